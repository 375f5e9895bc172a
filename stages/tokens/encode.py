"""Text → token ids, computed once and shared by both phases.

Held-out documents are set aside first; the vocabulary is learned from the rest. Parts of the corpus are made in order
and written atomically, so a rerun continues at the first missing part, and the bytes do not depend on the number of
processes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.disk_space import require_disk_space
from common.errors import UserError
from common.hashing import InputHashes, changed
from common.workers import Workers
from stages.directory.builders import ALONE, Builders, Unshown
from stages.directory.manifest import Output, StageDirectory
from stages.directory.progress import Progress
from stages.directory.records import DATA_CARD
from stages.text.base import Document, Source
from stages.text.corpus import HELD_OUT_TOKEN_FILES, TOKENIZER, TokenizeOptions
from stages.text.sentences import sentences
from stages.text.spans import texts_of
from stages.tokens.data_card import write_data_card
from stages.tokens.files import (
    SPLITS,
    TEST,
    TRAINING,
    Tokens,
    document_digests,
    part_path,
    part_paths,
    read_part,
    total_counts,
    write_part,
)
from stages.tokens.parts import Parts, SharedParts, in_batches, share_held_out, split_documents
from stages.tokens.vocabulary import make_tokenizer
from stages.tokens.wordpiece import Encoder
from trainer.data.shards import id_dtype
from trainer.data.vocabulary import UNK, read_vocabulary

#: Sentences per batch, and words in them, reported as examples of what the vocabulary cannot spell.
_EXAMPLES = 5
_EXAMPLE = "unknown word "
#: Bytes of ids and lengths per byte of text, a low estimate; measured 0.48 for WikiText-2 with BERT's vocabulary.
_BYTES_PER_BYTE = 0.4


@dataclass(frozen=True)
class _Batch:
    """Consecutive documents of one part: a worker's unit of work."""

    part: Path
    last: bool
    documents: list[Document]
    tokenizer: Path
    lower_case: bool
    #: Directory with the tokens of documents to leave out.
    exclude: Path | None


@dataclass(frozen=True)
class _Encoded:
    part: Path
    last: bool
    characters: int
    tokens: Tokens


class _EncodeProgress:
    """The tokenized share of the sources: the share read times the fraction of it already encoded."""

    def __init__(self, sources: list[Source], bar: Progress | Unshown) -> None:
        self._sources = sources
        self._size = max(sum(source.size for source in sources), 1)
        self._bar = bar
        self._shown = 0
        self._read = self._done = self._here = 0

    def reading(self, documents: Iterable[tuple[str, Document]]) -> Iterator[tuple[str, Document]]:
        for split, document in documents:
            self._read += len(document)
            yield split, document

    def done(self, characters: int, *, here: bool = False) -> None:
        """Count characters that are encoded; `here`: by this process, not before it or by another machine."""
        self._done += characters
        self._here += characters if here else 0
        now = int(self._share_of(self._done) * self._size)
        self._bar.update(now - self._shown)
        self._shown = now

    @property
    def share_here(self) -> float:
        """The share of the sources that this process has encoded."""
        return self._share_of(self._here)

    def _share_of(self, characters: int) -> float:
        position = sum(source.position for source in self._sources)
        return position / self._size * characters / max(self._read, 1)


def tokenize_corpus(
    work: StageDirectory,
    options: TokenizeOptions,
    *,
    processes: int,
    hashes: InputHashes | None = None,
    builders: Builders = ALONE,
) -> dict[str, Any]:
    """Write the tokenizer and the token parts to `work` and complete it; returns the counts. Raises `UserError`.

    With several `builders`, all but the first only write parts, and return {} when the stage is complete.
    """
    corpus = options.open(hashes or InputHashes())
    sources, held_out_sources = corpus.sources, corpus.held_out_sources
    if corpus.inputs() != work.identity.inputs:
        raise changed("the text or the vocabulary")
    text_bytes = sum(source.text_bytes for source in (*sources, *held_out_sources))
    estimate = int(_BYTES_PER_BYTE * text_bytes)
    written = sum(path.stat().st_size for split in SPLITS for path in part_paths(work.path, split))
    require_disk_space(work.path, estimate - written, "the ids of this text need about")
    share = 0.0 if held_out_sources else share_held_out(sources, options.held_out)
    dropped: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    ready: list[Tokens] = []
    with Workers(processes) as workers:
        vocabulary = make_tokenizer(work, corpus, share, workers, builders)
        total = sum(source.size for source in (*sources, *held_out_sources))
        with builders.progress(work, "tokenize", total, "B") as bar:
            progress = _EncodeProgress([*sources, *held_out_sources], bar)
            parts = SharedParts(work.path, builders, progress.done)
            split = split_documents(sources, held_out_sources, share, options.seed, dropped, workers)
            batches = _batches(parts, progress.reading(split), options)
            for encoded in workers.map(_encode, batches):
                ready.append(encoded.tokens)
                if encoded.last:
                    write_part(encoded.part, ready)
                    ready = []
                    parts.look()
                progress.done(encoded.characters, here=True)
                seen.update(encoded.tokens.counts)
                # Fail early: once over the limit for the whole corpus, no remaining text can bring the share down.
                _check_unknown(seen, options.max_unknown_share, of_corpus=progress.share_here)
            if not builders.is_first:
                builders.wait_for_end(work)
                return {}
            builders.wait_for(parts.are_all_there, "the parts of the other machines")
    totals = {split: total_counts(part_paths(work.path, split)) for split in SPLITS}
    _check_unknown(totals[TRAINING] + totals[TEST], options.max_unknown_share)
    counts = {**_counts(totals, vocabulary, dropped), "text_bytes": text_bytes}
    write_data_card(work.path, corpus, totals, counts)
    work.finish(_outputs(work.path), counts)
    return counts


def _check_unknown(counts: Counter[str], most: float, *, of_corpus: float = 1.0) -> None:
    """Raise `UserError` if the [UNK] counted in the share `of_corpus` already exceed the limit for all of it."""
    share = counts["unknown"] / max(counts["tokens"], 1)
    if share * of_corpus <= most:
        return
    words = Counter({key.removeprefix(_EXAMPLE): n for key, n in counts.items() if key.startswith(_EXAMPLE)})
    examples = " ".join(word for word, _ in words.most_common(_EXAMPLES))
    raise UserError(
        f"{share:.1%} of {counts['tokens']:,} tokens are {UNK}, as the vocabulary cannot spell words such as "
        f"{examples}; allowed: {most:.1%}; give a vocabulary for this text, or raise --max-unknown-share ([corpus] "
        f"max_unknown_share)"
    )


def _counts(by_split: dict[str, Counter[str]], vocabulary: list[str], counted: Counter[str]) -> dict[str, Any]:
    total = by_split[TRAINING] + by_split[TEST]
    dropped = Counter({key: count for key, count in counted.items() if not key.startswith("read ")})
    for key in [key for key in total if key.startswith("dropped ")]:
        dropped[key.removeprefix("dropped ")] += total[key]
    if not total["documents"]:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(dropped.items()))
        raise UserError(f"no document of the corpus has any text in it ({reasons}); give another source")
    return {
        "documents": by_split[TRAINING]["documents"],
        "held_out_documents": by_split[TEST]["documents"],
        "sentences": total["sentences"],
        "tokens": total["tokens"],
        "vocab_size": len(vocabulary),
        "unknown_share": round(total["unknown"] / max(total["tokens"], 1), 6),
        "read": {key.removeprefix("read "): count for key, count in counted.items() if key.startswith("read ")},
        "dropped": dict(sorted(dropped.items())),
    }


def _batches(
    parts: SharedParts, documents: Iterator[tuple[str, Document]], options: TokenizeOptions
) -> Iterator[_Batch]:
    """Yield the batches of the missing parts that are made here, part by part."""
    directory = parts.directory
    splits = {split: Parts() for split in SPLITS}

    def batches_of(split: str, part_documents: list[Document]) -> Iterator[_Batch]:
        number = splits[split].number
        path = part_path(directory, split, number)
        splits[split].number += 1
        if not parts.is_made_here(path, number, part_documents):
            return
        left = len(part_documents)
        for batch in in_batches(part_documents):
            left -= len(batch)
            yield _Batch(path, not left, batch, directory / TOKENIZER, options.lower_case, options.exclude)

    for split, document in documents:
        if full := splits[split].add(document):
            yield from batches_of(split, full)
    for split in SPLITS:
        for rest in splits[split].rest():
            yield from batches_of(split, rest)


@functools.cache
def _encoder(tokenizer: Path, lower_case: bool) -> tuple[Encoder, int, type[np.uint16] | type[np.uint32]]:
    """The encoder, the id of [UNK], and the type of ids."""
    vocabulary = read_vocabulary(tokenizer / "vocab.txt")
    return Encoder(vocabulary, lower_case=lower_case), vocabulary.index(UNK), id_dtype(len(vocabulary))


@functools.cache
def _excluded(directory: Path) -> frozenset[bytes]:
    parts = [read_part(path) for path in sorted(directory.glob(HELD_OUT_TOKEN_FILES))]
    return frozenset(digest for part in parts for digest in document_digests(**part))


def _encode(batch: _Batch) -> _Encoded:
    """Extract, split and tokenize the text of a batch; drop sentences and documents without tokens, and excluded
    documents."""
    encoder, unk, dtype = _encoder(batch.tokenizer, batch.lower_case)
    dropped: Counter[str] = Counter()
    texts = list(texts_of(batch.documents, dropped))
    found = [sentences(text) for text in texts if text]  # an empty text was counted in `dropped`
    flat = [sentence for document in found for sentence in document]
    ids, lengths = encoder.encode(flat)
    owners = np.repeat(np.arange(len(found)), [len(document) for document in found])[lengths > 0]
    per_document = np.bincount(owners, minlength=len(found))
    dropped["sentences: no tokens"] = len(lengths) - len(owners)
    dropped["documents: no tokens"] = int(np.count_nonzero(per_document == 0))
    unknown = np.flatnonzero(ids == unk)
    with_unknown = np.unique(np.searchsorted(np.cumsum(lengths), unknown, "right"))[:_EXAMPLES]
    examples = Counter(encoder.unknown_words([flat[number] for number in with_unknown])).most_common(_EXAMPLES)
    lengths, per_document = lengths[lengths > 0], per_document[per_document > 0]
    if batch.exclude is not None:
        excluded = _excluded(batch.exclude)
        kept = np.array([one not in excluded for one in document_digests(ids, lengths, per_document)], bool)
        kept_sentences = np.repeat(kept, per_document)
        ids, lengths, per_document = (
            ids[np.repeat(kept_sentences, lengths)],
            lengths[kept_sentences],
            per_document[kept],
        )
        dropped["documents: held out"] = int(np.count_nonzero(~kept))
    counts = {
        "documents": len(per_document),
        "sentences": len(lengths),
        "tokens": len(ids),
        "unknown": int(np.count_nonzero(ids == unk)),
        **{f"dropped {reason}": count for reason, count in dropped.items()},
        **{f"{_EXAMPLE}{word[:40]}": count for word, count in examples},
    }
    tokens = Tokens(
        ids.astype(dtype),
        lengths.astype(np.uint32),
        per_document.astype(np.uint32),
        {key: count for key, count in counts.items() if count},
    )
    return _Encoded(batch.part, batch.last, sum(map(len, batch.documents)), tokens)


def _outputs(directory: Path) -> list[Output]:
    tokenizer, parts = sorted((directory / TOKENIZER).iterdir()), sorted(directory.glob("tokens_*.hdf5"))
    return [Output.of(directory, path) for path in (*tokenizer, *parts, directory / DATA_CARD)]
