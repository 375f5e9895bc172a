"""Where text comes from: sources, read as documents.

Reading is cheap and sequential. What costs time, making text of markup and splitting it into sentences, is left to
whoever tokenizes, in any process. A new kind of file is a class and a line in `kind_of`.
"""

from __future__ import annotations

import glob
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.jsonl import JsonLinesSource
from stages.manifest import Identity
from stages.source import Document, FileSource, Source, cannot_read, text_of
from stages.text import PlainTextSource
from stages.wikipedia import WikipediaSource
from trainer.errors import UserError
from trainer.files import sha256_of

BUILTIN = "builtin"
STAGE = "tokenize_corpus"
FORMAT_VERSION = 1
#: What ends a document of plain text.
BLANK_LINE, FILE = DOCUMENT_ENDS = ("blank_line", "file")


class BuiltinSource:
    """The documentation inside the running CPython."""

    name = BUILTIN
    #: About the size of its text in CPython 3.11; only a progress bar and the vocabulary sample need it.
    size = text_bytes = 1_700_000

    def __init__(self) -> None:
        self.position = 0

    def identity(self) -> str:
        return f"{platform.python_implementation()} {platform.python_version()}"

    def documents(self, dropped: Counter[str]) -> Iterator[Document]:
        from stages.builtin import builtin_documents

        texts, counts = builtin_documents()
        dropped.update(counts)
        self.position = 0
        for text in texts:
            yield text
            self.position += len(text)
        self.position = self.size


def kind_of(path: Path) -> type[FileSource]:
    """How a file is read, by its name: JSON Lines, a MediaWiki dump (….xml, ….xml-p10p303), or text; packed or not."""
    name = re.sub(r"\.(gz|bz2)$", "", path.name)
    if name.endswith(".jsonl"):
        return JsonLinesSource
    return WikipediaSource if re.search(r"\.xml(-[^.]*)?$", name) else PlainTextSource


def open_sources(specs: Iterable[str], *, document: str = BLANK_LINE) -> list[Source]:
    """The sources that `specs` ("builtin", files, globs) name, files of a glob in the order of their names.

    `document`: what ends a document of plain text, one of `DOCUMENT_ENDS`.

    Raises `UserError`: no such file, a folder, a glob that matches nothing, a source named twice.
    """
    sources: list[Source] = []
    for spec in specs:
        if spec == BUILTIN:
            sources.append(BuiltinSource())
            continue
        for path in _expand(spec):
            sources.append(kind_of(path)(path, one_document=document == FILE))
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


def raw_documents(sources: Iterable[Source], dropped: Counter[str]) -> Iterator[Document]:
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
            raise cannot_read(source, error) from error
        if not anything:
            dropped["files: no text in them"] += 1
            empty.append(source.name)
    if not found:
        others = f" (nor {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise UserError(
            f"{empty[0]}{others} holds no text: {_what_was_dropped(dropped)}; give UTF-8 text with a blank line "
            f"between documents, JSON Lines (.jsonl), or a MediaWiki dump (.xml)"
        )


def _what_was_dropped(dropped: Counter[str]) -> str:
    what = [f"{reason} {count:,}" for reason, count in sorted(dropped.items()) if not reason.startswith("files: ")]
    return f"nothing was left ({', '.join(what)})" if what else "it is empty, or only white space"


def sentences(document: str) -> list[str]:
    """The sentences of a text, in order, stripped; none reaches over a line end."""
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
    dropped: Counter[str] = Counter()
    for document in raw_documents(open_sources([spec]), dropped):
        if found := sentences(text_of(document, dropped)):
            yield found


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
    document: str = BLANK_LINE
    #: More of the tokens than this must not be [UNK]. It says only whether, not what comes out.
    max_unknown_share: float = 0.05

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError(f"no source is given; give --source {BUILTIN}, a file or a glob")
        if not 0 <= self.held_out < 1:
            raise UserError(f"--held-out is {self.held_out}; it is a share of the documents, 0 or more and below 1")
        if self.vocab_size < 1:
            raise UserError(f"--vocab-size is {self.vocab_size}; it counts the pieces of the vocabulary, 8192 for one")

        if not 0 <= self.max_unknown_share <= 1:
            raise UserError(f"--max-unknown-share is {self.max_unknown_share}; it is a share of the tokens, 0 to 1")

    def open(self) -> tuple[list[Source], list[Source]]:
        """The sources, and those of held-out text."""
        return (
            open_sources(self.sources, document=self.document),
            open_sources(self.held_out_sources, document=self.document),
        )

    def identity(self) -> Identity:
        """Reads all the sources, for their content is their identity."""
        parameters: dict[str, Any] = {"lower_case": self.lower_case, "seed": self.seed}
        sources, held_out_sources = self.open()
        inputs: dict[str, Any] = {"sources": [source.identity() for source in sources]}
        if self.document != BLANK_LINE and any(isinstance(s, PlainTextSource) for s in (*sources, *held_out_sources)):
            parameters["document"] = self.document
        if held_out_sources:
            inputs["held_out_sources"] = [source.identity() for source in held_out_sources]
        else:
            parameters["held_out"] = self.held_out
        if self.vocab_file is None:
            parameters["vocab_size"] = self.vocab_size
        else:
            from stages.wordpiece import read_vocabulary  # numpy comes with it

            read_vocabulary(self.vocab_file)  # refuse a bad one before anything is made
            inputs["vocabulary"] = sha256_of(self.vocab_file)
        return Identity(stage=STAGE, format_version=FORMAT_VERSION, parameters=parameters, inputs=inputs)
