"""The sources of a corpus, read as documents.

Reading is cheap and sequential. The expensive work, extracting text from markup and splitting it into sentences, is
left to the tokenizing workers. To add a file format, write a class and register it in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from common.errors import UserError
from common.hashing import InputFile, InputHashes, digest
from common.options import option
from stages.directory.manifest import Identity
from stages.directory.options import BuildOptions
from stages.text.base import PACKED, Document, FileSource, Source, cannot_read
from stages.text.jsonl import JsonLinesSource
from stages.text.patterns import expand
from stages.text.plain import PlainTextSource
from stages.text.spans import reader
from stages.text.tables import ArrowSource, ParquetSource
from stages.text.wikipedia import WikipediaSource

if TYPE_CHECKING:
    from common.workers import Workers

BUILTIN = "builtin"
#: Folder of the tokenizer inside a tokenized corpus.
TOKENIZER = "tokenizer"
#: Files of the held-out documents inside a tokenized corpus.
HELD_OUT_TOKEN_FILES = "tokens_test_*.hdf5"
#: What ends a document of plain text.
BLANK_LINE, FILE = DOCUMENT_ENDS = ("blank_line", "file")
#: File name extension → source class.
FORMATS: dict[str, type[FileSource]] = {
    ".jsonl": JsonLinesSource,
    ".xml": WikipediaSource,
    ".parquet": ParquetSource,
    ".arrow": ArrowSource,
    ".feather": ArrowSource,
}


class BuiltinSource:
    """The documentation that comes with the running Python and with packages that are installed anyway."""

    name = BUILTIN
    language = "en"
    #: Approximate size of its text; only the progress bar and the vocabulary sample use it.
    size = text_bytes = 9_500_000

    def __init__(self) -> None:
        self.position = 0

    def identity(self) -> str:
        from stages.text.builtin import packages

        python = f"{platform.python_implementation()} {platform.python_version()}"
        return ", ".join([python, *map(" ".join, packages().items())])

    def documents(self, dropped: Counter[str]) -> Iterator[Document]:
        from stages.text.builtin import builtin_documents

        texts, counts = builtin_documents()
        dropped.update(counts)
        self.position = 0
        for text in texts:
            yield text
            self.position += len(text)
        self.position = self.size


def kind_of(path: str) -> type[FileSource]:
    """The source class for a file, by the extension before one of `PACKED`; plain text if `FORMATS` does not list it.

    Avoids regular expressions, which take 0.1 s for 100,000 names.
    """
    name = path.rpartition("/")[2]
    for packed in PACKED:
        name = name.removesuffix(packed)
    _, dot, ending = name.rpartition(".")
    if ending.startswith("xml-"):  # a part of a dump: ….xml-p10p303
        ending = "xml"
    return FORMATS.get(dot + ending, PlainTextSource)


def find_files(specs: Iterable[str]) -> list[str]:
    """Expand `specs` ("builtin", files, globs) to `BUILTIN` and file paths; the matches of a glob are sorted by name.

    Raises `UserError` if a spec matches no file or names a folder, or a file is named twice.
    """
    found: list[str] = []
    for spec in specs:
        found += [spec] if spec == BUILTIN else expand(spec)
    if len(set(found)) < len(found):
        name, count = Counter(found).most_common(1)[0]
        raise UserError(f"source {name} is named {count} times; name each once")
    return found


def open_sources(specs: Iterable[str], hashes: InputHashes, *, document: str = BLANK_LINE) -> list[Source]:
    """Open and hash the sources named by `specs`. `document`, one of `DOCUMENT_ENDS`: what ends a plain-text document.

    Raises `UserError` as `find_files` does, for one file under two names, and for a file that cannot be read.
    """
    found = find_files(specs)
    hashed = hashes.hash([name for name in found if name != BUILTIN])
    _require_each_once(hashed)
    files = iter(hashed)
    return [
        BuiltinSource() if name == BUILTIN else kind_of(name)(next(files), one_document=document == FILE)
        for name in found
    ]


def _require_each_once(files: Sequence[InputFile]) -> None:
    """Raise `UserError` if a file has two of the names: a.txt and ./a.txt, or a link to it."""
    states, names = Counter(file.state for file in files), dict[str, str]()
    for file in files:
        # One file is in one state; to resolve 100,000 paths would take a second of every command.
        if states[file.state] > 1 and (other := names.setdefault(os.path.realpath(file.path), file.path)) != file.path:
            raise UserError(f"source {file.path} is the same file as {other}; name each file once")


def _require_apart(sources: Sequence[Source], held_out_sources: Sequence[Source]) -> None:
    """Raise `UserError` if the text of one of the `sources` is held out, too."""
    names = {_content(source): source.name for source in sources} if held_out_sources else {}
    for source in held_out_sources:
        if source.size and (other := names.get(_content(source))):
            raise UserError(
                f"held-out source {source.name} has the same content as source {other}; a model is not evaluated on "
                f"text that it is trained on: leave it out of one of them"
            )


def _content(source: Source) -> str:
    return source.file.sha256 if isinstance(source, FileSource) else source.identity()


def raw_documents(
    sources: Sequence[Source], dropped: Counter[str], workers: Workers | None = None
) -> Iterator[Document]:
    """Yield the documents of all sources in order; raises `UserError` if a file is unreadable or all text is empty.

    Several `workers` find the documents themselves, which are then places in a file where that is possible.
    """
    empty: list[str] = []
    found, read = False, reader(sources, workers)
    for source in sources:
        anything = False
        try:
            for document in read(source, dropped):
                anything = found = True
                yield document
        except OSError as error:
            raise cannot_read(source, error) from error
        if not anything:
            dropped["files: no text in them"] += 1
            empty.append(source.name)
    if not found:
        others = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise UserError(
            f"{empty[0]}{others} holds no text: {_what_was_dropped(dropped)}; give UTF-8 text with a blank line "
            f"between documents, JSON Lines (.jsonl), Parquet, Arrow, or a MediaWiki dump (.xml)"
        )


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collections would find nothing among the objects of 100,000 files, and take 0.3 s of every command."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _what_was_dropped(dropped: Counter[str]) -> str:
    what = [f"{reason} {count:,}" for reason, count in sorted(dropped.items()) if not reason.startswith("files: ")]
    return f"nothing was left ({', '.join(what)})" if what else "it is empty, or only white space"


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(BuildOptions):
    """The text of a corpus and how to tokenize it."""

    module: ClassVar = "stages.tokenize"
    stage: ClassVar = "tokenize_corpus"
    format_version: ClassVar = 2  # 2: lines over 8,192 characters are split into sentences in pieces

    sources: tuple[str, ...] = option(
        names=("--source",),
        metavar="builtin|FILE|GLOB",
        help="plain text, .jsonl, .arrow or MediaWiki .xml, optionally .gz, .bz2 or .zst, or .parquet; in a glob ** "
        "matches any depth of folders; a file of exactly that name takes precedence; repeatable",
    )
    held_out_sources: tuple[str, ...] = option(
        (), names=("--held-out-source",), metavar="FILE|GLOB", help="text used only for evaluation"
    )
    document: str = option(BLANK_LINE, choices=DOCUMENT_ENDS, help="end of a plain-text document")
    exclude: Path | None = option(
        None,
        metavar="DIR",
        help="leave out documents with the same tokens as one of DIR/tokens_test_*.hdf5; needs their --vocab-file",
    )
    vocab_file: Path | None = option(None, metavar="FILE", help="vocab.txt to use, [PAD] first (default: learn one)")
    vocab_size: int = option(8192, unit="pieces", least=1, help="pieces of the vocabulary to learn")
    lower_case: bool = option(True, help="lower-case and strip accents, for an uncased model")
    held_out: float = option(0.05, unit="share", least=0, below=1, help="share of documents to evaluate on")
    seed: int = option(12345, help="seed of the draw of held-out documents")
    max_unknown_share: float = option(
        0.05, unit="share", least=0, most=1, decides=False, help="fail if the share of [UNK] exceeds this"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise UserError(f"no source is given; give {BUILTIN}, a file or a glob")
        if self.exclude is not None and not any(self.exclude.glob(HELD_OUT_TOKEN_FILES)):
            raise UserError(
                f"--exclude {self.exclude} has no {HELD_OUT_TOKEN_FILES}; give a directory of stages.tokenize"
            )

    def identity(self, hashes: InputHashes | None = None, upstream: Mapping[str, str] | None = None) -> Identity:
        """Hash all files: the result is identified by their content, not their paths. Raises `UserError`."""
        corpus = self.open(hashes or InputHashes())
        return Identity(self.stage, self.format_version, parameters=corpus.parameters(), inputs=corpus.inputs())

    def open(self, hashes: InputHashes) -> Corpus:
        """Find and hash all files. Raises `UserError`, also if one is both a source and held out."""
        with no_garbage_collection():
            sources, held_out_sources = (
                open_sources(specs, hashes, document=self.document) for specs in (self.sources, self.held_out_sources)
            )
            _require_apart(sources, held_out_sources)
            return Corpus(
                self,
                sources,
                held_out_sources,
                None if self.vocab_file is None else hashes.hash([self.vocab_file])[0],
                [] if self.exclude is None else hashes.hash(sorted(self.exclude.glob(HELD_OUT_TOKEN_FILES))),
            )


@dataclass(frozen=True)
class Corpus:
    """The hashed sources and vocabulary of a corpus."""

    options: TokenizeOptions
    sources: list[Source]
    held_out_sources: list[Source]
    #: The given vocabulary; None: learn one.
    vocabulary: InputFile | None
    #: Tokens of documents that are left out.
    excluded: Sequence[InputFile]

    def parameters(self) -> dict[str, Any]:
        """The options that affect the tokens of these files."""
        options = self.options
        parameters: dict[str, Any] = {"lower_case": options.lower_case, "seed": options.seed}
        is_plain = any(isinstance(source, PlainTextSource) for source in (*self.sources, *self.held_out_sources))
        if options.document != BLANK_LINE and is_plain:
            parameters["document"] = options.document
        if not self.held_out_sources:
            parameters["held_out"] = options.held_out
        if self.vocabulary is None:
            parameters["vocab_size"] = options.vocab_size
        return parameters

    def inputs(self) -> dict[str, Any]:
        """Digests of the files' content, independent of their paths."""
        inputs: dict[str, Any] = {"sources": digest(source.identity() for source in self.sources)}
        if self.held_out_sources:
            inputs["held_out_sources"] = digest(source.identity() for source in self.held_out_sources)
        if self.vocabulary is not None:
            inputs["vocabulary"] = self.vocabulary.sha256
        if self.excluded:
            inputs["excluded"] = digest(file.sha256 for file in self.excluded)
        return inputs
