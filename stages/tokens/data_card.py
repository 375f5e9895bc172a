"""The data card beside the tokens: what the text is, how much of it there is, and what was left out.

In the format of the Hugging Face Hub's dataset cards. The same files and settings give the same card: its only date is
that of the newest file, and files are named without their folders.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.files import durable_file, sha256_of, utc
from common.markdown import table
from common.secrets import redact
from stages.directory.records import DATA_CARD
from stages.text.base import FileSource, Source
from stages.text.corpus import FILE, TOKENIZER, Corpus
from stages.text.plain import PlainTextSource
from stages.tokens.files import SPLITS, part_paths, tokens_of_documents

#: Files that are listed one by one; the manifest's inputs identify all of them.
_LISTED = 1000
_QUANTILES = {"shortest": 0.0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "99%": 0.99,
              "longest": 1.0}  # fmt: skip
#: The Hub's size categories, by the number of documents.
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B",
          "10B<n<100B", "100B<n<1T", "n>1T")  # fmt: skip
#: Libraries that read a format, and those that affect every token.
_READERS = {"mediawiki": "wikitextparser", "parquet": "pyarrow", "arrow": "pyarrow"}
_LIBRARIES = ("tokenizers", "sentencex")
#: A BCP 47 tag, of which the Hub takes the first two or three letters.
_LANGUAGE = re.compile(r"([a-z]{2,3})(?:-[A-Za-z0-9]{1,8})*")
_SUMMARY = (
    "WordPiece ids of {documents:,} documents, for pretraining BERT. `manifest.json` beside this card lists every file "
    "with its sha256, and says when they were made. An edited card is made anew: edit a copy."
)
_FILES = (
    "`tokens_training_*.hdf5` and `tokens_test_*.hdf5` (held out) have `tokens`, the ids of all documents in a row, "
    "`sentence_lengths` in tokens and `document_lengths` in sentences. `tokenizer/` is loaded by "
    "`BertTokenizerFast.from_pretrained`."
)


def write_data_card(
    directory: Path, corpus: Corpus, totals: Mapping[str, Counter[str]], counts: Mapping[str, Any]
) -> None:
    """Write the card of a tokenized corpus with complete parts. `totals`: the parts' counts by split; `counts`: the
    stage's. Raises `DiskError`."""
    histograms = {split: tokens_of_documents(part_paths(directory, split)) for split in SPLITS}
    every = [*corpus.sources, *corpus.held_out_sources]
    documents = counts["documents"] + counts["held_out_documents"]
    parts = [
        _metadata(every, documents),
        "# Tokenized text",
        _SUMMARY.format(documents=documents),
        "## Text",
        _sources(corpus.sources),
        *(["Held-out documents come from files of their own:", _sources(corpus.held_out_sources)]
          if corpus.held_out_sources else []),
        table(("", ""), _about(corpus, counts)),
        "## Size",
        table(("", "training", "held out"), _sizes(totals)),
        "Tokens of a document:",
        table(("", "training", "held out"), _lengths(histograms)),
        "## Left out",
        table(("what was dropped", "how many"), _numbers(counts["dropped"])) or "Nothing was dropped.",
        table(("what was read", "how many"), _numbers(counts["read"])),
        "## Vocabulary",
        table(("", ""), _vocabulary(directory, corpus, counts)),
        "## Files",
        _FILES,
        "## Versions",
        table(("", ""), _versions(every)),
    ]  # fmt: skip
    with durable_file(directory / DATA_CARD) as file:
        file.write(("\n\n".join(part for part in parts if part) + "\n").encode(errors="backslashreplace"))


def _metadata(sources: Iterable[Source], documents: int) -> str:
    """The header that the Hub reads."""
    languages = {found[1] for source in sources if (found := _LANGUAGE.fullmatch(source.language))}
    size = _SIZES[min(max(len(str(documents)) - 3, 0), len(_SIZES) - 1)]
    lines = ["---", "pretty_name: Tokenized text", "task_categories:", "- fill-mask", "size_categories:", f"- {size}"]
    if languages:
        lines += ["language:", *(f"- {json.dumps(language)}" for language in sorted(languages))]
    return "\n".join([*lines, "tags:", "- bert", "- pretraining", "---"])


def _sources(sources: Sequence[Source]) -> str:
    rows = [
        [redact(Path(source.name).name), _format(source), f"{source.file.bytes:,}", f"`{source.file.sha256}`"]
        if isinstance(source, FileSource)
        else [source.name, "docstrings", "–", source.identity()]
        for source in sources[:_LISTED]
    ]
    more = len(sources) - len(rows)
    listed = table(("name", "format", "bytes", "sha256 or versions"), rows)
    return f"{listed}\n\n… and {more:,} more files, which `inputs` of `manifest.json` identifies." if more else listed


def _format(source: FileSource) -> str:
    packing = source.path.suffix if source.is_packed else ""
    return f"{source.kind or 'text'}{packing}"


def _about(corpus: Corpus, counts: Mapping[str, Any]) -> list[list[str]]:
    every = [*corpus.sources, *corpus.held_out_sources]
    files = [source.file for source in every if isinstance(source, FileSource)]
    languages = sorted({source.language or "not stated" for source in every})
    options, documents = corpus.options, counts["documents"] + counts["held_out_documents"]
    rows = [["files", f"{len(files):,}"], ["bytes", f"{sum(file.bytes for file in files):,}"]] if files else []
    if files:
        rows.append(["newest file changed (UTC)", utc(max(file.modified_s for file in files))[:10]])
    rows.append(["language", ", ".join(languages)])
    if any(isinstance(source, PlainTextSource) for source in every):
        rows.append(
            ["a document of plain text ends", "with its file" if options.document == FILE else "at a blank line"]
        )
    share = f"{counts['held_out_documents'] / documents:.2%}"
    drawn = "from files of their own" if corpus.held_out_sources else f"drawn with seed {options.seed}"
    return [*rows, ["documents held out", f"{share}, {drawn}"]]


def _sizes(totals: Mapping[str, Counter[str]]) -> list[list[str]]:
    return [[name, *(f"{totals[split][name]:,}" for split in SPLITS)] for name in ("documents", "sentences", "tokens")]


def _lengths(histograms: Mapping[str, NDArray[np.int64]]) -> list[list[str]]:
    """Quantiles of the lengths: the shortest length that this share of the documents does not exceed."""
    found = {split: _quantiles(histogram) for split, histogram in histograms.items()}
    return [[name, *(f"{found[split][name]:,}" if found[split] else "–" for split in SPLITS)] for name in _QUANTILES]


def _quantiles(histogram: NDArray[np.int64]) -> dict[str, int]:
    """Quantiles by name; {} if there are no documents. `histogram`: (longest + 1,)."""
    counted = np.cumsum(histogram)
    if not len(counted):
        return {}
    ranks = np.ceil(np.array(list(_QUANTILES.values())) * counted[-1]).clip(1)
    return dict(zip(_QUANTILES, np.searchsorted(counted, ranks).tolist(), strict=True))


def _numbers(counted: Mapping[str, int]) -> list[list[str]]:
    return [[name, f"{count:,}"] for name, count in sorted(counted.items()) if count]


def _vocabulary(directory: Path, corpus: Corpus, counts: Mapping[str, Any]) -> list[list[str]]:
    return [
        ["pieces", f"{counts['vocab_size']:,}"],
        ["made", "learned from the training documents" if corpus.vocabulary is None else "given"],
        ["case", "lower, without accents" if corpus.options.lower_case else "kept"],
        ["tokens that are [UNK]", f"{counts['unknown_share']:.4%}"],
        ["sha256 of vocab.txt", f"`{sha256_of(directory / TOKENIZER / 'vocab.txt')}`"],
    ]


def _versions(sources: Iterable[Source]) -> list[list[str]]:
    readers = {
        _READERS[source.kind] for source in sources if isinstance(source, FileSource) and source.kind in _READERS
    }
    return [["python", platform.python_version()], *([name, version(name)] for name in (*_LIBRARIES, *sorted(readers)))]
