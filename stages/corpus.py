"""Where text comes from: sources, read as documents.

A raw document is a string, one paragraph or sentence a line; `sentences` splits it. Reading is cheap and sequential,
splitting is left to whoever tokenizes, in any process. A new kind of file is one more class in `FILE_SOURCES`.
"""

from __future__ import annotations

import glob
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stages.manifest import Identity
from trainer.errors import UserError
from trainer.files import sha256_of

BUILTIN = "builtin"
STAGE = "tokenize_corpus"
FORMAT_VERSION = 1

_BLOCK_BYTES = 1 << 20
#: A document longer than this many characters is cut at a line end, so that memory is bounded by it.
DOCUMENT_CHARACTERS_MAX = 4 << 20
# Something to see: not white space, control characters, zero-width marks or the byte-order mark.
_VISIBLE = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028\u2029\u2060\ufeff]")


class Source(Protocol):
    """One place that documents come from."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def size(self) -> int:
        """Its size, about, in bytes."""

    def identity(self) -> str:
        """What tells its content from any other."""

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        """Raw documents, always in the same order; counts what it drops, by reason. Raises `UserError`."""


def cannot_read(source: Source, error: OSError) -> UserError:
    return UserError(f"cannot read {source.name}: {error.strerror}; check the file and its permissions")


class BuiltinSource:
    """The documentation inside the running CPython."""

    name = BUILTIN
    #: About the size of its text in CPython 3.11; only a progress bar and the vocabulary sample need it.
    size = 1_700_000

    def identity(self) -> str:
        return f"{platform.python_implementation()} {platform.python_version()}"

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        from stages.builtin import builtin_documents

        texts, counts = builtin_documents()
        dropped.update(counts)
        yield from texts


class PlainTextSource:
    """A UTF-8 text file: one paragraph or sentence a line, a blank line between documents."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def identity(self) -> str:
        try:
            return sha256_of(self.path)
        except OSError as error:
            raise cannot_read(self, error) from error

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        lines: list[str] = []
        characters = 0
        for line in _lines(self.path, dropped):
            if _VISIBLE.search(line):
                lines.append(line)
                characters += len(line)
                if characters < DOCUMENT_CHARACTERS_MAX:
                    continue
                dropped["document ends: cut, too long"] += 1
            elif line and not line.isspace():
                dropped["lines: control characters only"] += 1
                continue
            if lines:
                yield "\n".join(lines)
            lines, characters = [], 0
        if lines:
            yield "\n".join(lines)


#: File name ending → class of its source; every other file is plain text.
FILE_SOURCES: dict[str, type[PlainTextSource]] = {}


def open_sources(specs: Iterable[str]) -> list[Source]:
    """The sources that `specs` ("builtin", files, globs) name, files of a glob in the order of their names.

    Raises `UserError`: no such file, a folder, a glob that matches nothing, a source named twice.
    """
    sources: list[Source] = []
    for spec in specs:
        if spec == BUILTIN:
            sources.append(BuiltinSource())
            continue
        for path in _expand(spec):
            kind = next((kind for ending, kind in FILE_SOURCES.items() if path.name.endswith(ending)), PlainTextSource)
            sources.append(kind(path))
    names = Counter(source.name for source in sources)
    for name, count in names.items():
        if count > 1:
            raise UserError(f"source {name} is named {count} times; name each once")
    return sources


def _expand(spec: str) -> list[Path]:
    path = Path(spec)
    if path.is_dir():
        raise UserError(f"source {spec} is a folder; name a text file, or a quoted glob such as '{spec.rstrip('/')}/*'")
    if path.exists():
        if not path.is_file():
            raise UserError(f"source {spec} is not a regular file; name a text file, a glob or '{BUILTIN}'")
        return [path]
    if not glob.has_magic(spec):
        raise UserError(f"there is no source file {spec}; name a text file, a glob or '{BUILTIN}'")
    paths = sorted(p for p in map(Path, glob.glob(spec, recursive=True)) if p.is_file())
    if not paths:
        raise UserError(f"no file matches the source {spec}; name a text file, a glob or '{BUILTIN}'")
    return paths


def raw_documents(sources: Iterable[Source], dropped: Counter[str]) -> Iterator[str]:
    """The documents of all sources, in order; raises `UserError` for what cannot be read, and where there is none."""
    empty: list[str] = []
    found = False
    for source in sources:
        anything = False
        try:
            for document in source.documents(dropped):
                anything = found = True
                yield document
        except OSError as error:
            raise UserError(
                f"cannot read {source.name}: {error.strerror}; check the file and its permissions"
            ) from error
        if not anything:
            dropped["files: no text in them"] += 1
            empty.append(source.name)
    if not found:
        others = f" (nor {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise UserError(
            f"{empty[0]}{others} holds no text: it is empty, or only white space and control characters; "
            f"give UTF-8 text, a blank line between documents"
        )


def sentences(document: str) -> list[str]:
    """The sentences of a raw document, in order, stripped; none reaches over a line end."""
    from sentencex import segment

    found: list[str] = []
    for line in document.split("\n"):
        inside = False
        for sentence in segment("en", line):
            if inside:
                found[-1] += sentence
            else:
                found.append(sentence)
            # The library ends a sentence inside of "tkinter.Tk()"; in scripts with spaces, one must follow.
            inside = sentence[-1].isascii() and not sentence[-1].isspace()
    return [stripped for sentence in found if (stripped := sentence.strip())]


def documents(spec: str) -> Iterator[list[str]]:
    """The documents of one source, as lists of sentences; raises `UserError` as `open_sources` and `raw_documents`."""
    return map(sentences, raw_documents(open_sources([spec]), Counter()))


def _lines(path: Path, dropped: Counter[str]) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends; lines over a megabyte come in pieces.

    Raises `UserError` with the byte offset of what is not UTF-8.
    """
    offset, rest = 0, b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            rest += block
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) > _BLOCK_BYTES:
                cut = _end_of_piece(rest)
                dropped["line ends: cut, too long"] += 1
            if cut:
                yield from _decode(path, rest[:cut], offset).removesuffix("\n").split("\n")
                offset, rest = offset + cut, rest[cut:]
    if rest:
        yield from _decode(path, rest, offset).split("\n")


def _end_of_piece(data: bytes) -> int:
    """Where to cut a long line: after its last space, else before its last character (never inside one)."""
    space = data.rfind(b" ") + 1
    if space:
        return space
    end = len(data) - 1
    while end > len(data) - 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _decode(path: Path, data: bytes, offset: int) -> str:
    try:
        # The mark that Windows programs put first is not text.
        return data.decode("utf-8").removeprefix("\ufeff") if offset == 0 else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}; "
            f"convert it, for example with iconv -t UTF-8"
        ) from None


@dataclass(frozen=True)
class CorpusOptions:
    """What decides what `stages.tokenize` makes; its command says what each is."""

    sources: tuple[str, ...]
    held_out_sources: tuple[str, ...] = ()
    vocab_file: Path | None = None
    vocab_size: int = 8192
    lower_case: bool = True
    held_out: float = 0.05
    seed: int = 12345

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError(f"no source is given; give --source {BUILTIN}, a file or a glob")
        if not 0 <= self.held_out < 1:
            raise UserError(f"--held-out is {self.held_out}; it is a share of the documents, 0 or more and below 1")
        if self.vocab_size < 1:
            raise UserError(f"--vocab-size is {self.vocab_size}; it counts the pieces of the vocabulary, 8192 for one")

    def identity(self) -> Identity:
        """Reads all the sources, for their content is their identity."""
        parameters: dict[str, Any] = {"lower_case": self.lower_case, "seed": self.seed}
        inputs: dict[str, Any] = {"sources": [source.identity() for source in open_sources(self.sources)]}
        if self.held_out_sources:
            inputs["held_out_sources"] = [source.identity() for source in open_sources(self.held_out_sources)]
        else:
            parameters["held_out"] = self.held_out
        if self.vocab_file is None:
            parameters["vocab_size"] = self.vocab_size
        else:
            from stages.wordpiece import read_vocabulary  # numpy comes with it

            read_vocabulary(self.vocab_file)  # refuse a bad one before anything is made
            inputs["vocabulary"] = sha256_of(self.vocab_file)
        return Identity(stage=STAGE, format_version=FORMAT_VERSION, parameters=parameters, inputs=inputs)
