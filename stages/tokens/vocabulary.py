"""The tokenizer of a corpus, from a given vocabulary or one learned from the training text."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from common.errors import UserError
from common.files import disk_errors
from common.workers import Workers
from stages.directory.builders import Builders
from stages.directory.manifest import StageDirectory
from stages.text.base import Document
from stages.text.corpus import TOKENIZER, Corpus
from stages.text.spans import texts_of
from stages.tokens.files import TRAINING
from stages.tokens.parts import in_batches, split_documents
from stages.tokens.wordpiece import LAST_FILE, count_words, learn_vocabulary, save_tokenizer
from trainer.data.vocabulary import read_vocabulary

#: A vocabulary is learned from an evenly spread sample of at most about this many bytes (of compressed files:
#: compressed bytes).
_SAMPLE_BYTES = 100 << 20


def make_tokenizer(
    work: StageDirectory, corpus: Corpus, share: float, workers: Workers, builders: Builders
) -> list[str]:
    """Write the tokenizer's files, learning a vocabulary if none is given or learned yet; returns the vocabulary. All
    but the first of several machines wait for it. Raises `UserError`."""
    directory, options = work.path / TOKENIZER, corpus.options
    if not builders.is_first:
        files = [directory / "vocab.txt", directory / LAST_FILE]  # of a damaged tokenizer, either may be left
        builders.wait_for(lambda: all(file.exists() for file in files), "machine 0 to make the vocabulary")
        return read_vocabulary(directory / "vocab.txt")
    if options.exclude is not None:
        _require_same_vocabulary(options.exclude, options.vocab_file)
    if corpus.vocabulary is not None:
        vocabulary = read_vocabulary(Path(corpus.vocabulary.path))
        corpus.vocabulary.require_unchanged()
    elif (directory / "vocab.txt").exists():
        vocabulary = read_vocabulary(directory / "vocab.txt")
    else:
        vocabulary = learn_vocabulary(_words(work, corpus, share, workers), size=options.vocab_size)
        if len(vocabulary) < options.vocab_size:
            print(f"note: this text gives a vocabulary of only {len(vocabulary)} pieces", file=sys.stderr)
    with disk_errors(directory):
        directory.mkdir(exist_ok=True)
    save_tokenizer(directory, vocabulary, lower_case=options.lower_case)
    return vocabulary


def _require_same_vocabulary(exclude: Path, vocabulary: Path | None) -> None:
    """Documents are compared by their ids: raise `UserError` if those in `exclude` are, or may be, of other pieces."""
    theirs = exclude / TOKENIZER / "vocab.txt"
    if vocabulary is None:
        seen = "no --vocab-file is given"
    elif theirs.exists() and read_vocabulary(theirs) != read_vocabulary(vocabulary):
        seen = f"{vocabulary} is another vocabulary"
    else:
        return
    needed = theirs if theirs.exists() else "FILE, the vocabulary of its tokens"
    raise UserError(f"--exclude {exclude} compares token ids, and {seen}; give --vocab-file {needed}")


def _words(work: StageDirectory, corpus: Corpus, share: float, workers: Workers) -> Counter[str]:
    """Word counts over the training documents, or an evenly spread sample of a large corpus."""
    options = corpus.options
    sources = [copy.copy(source) for source in corpus.sources]  # each has its own position
    size = sum(source.size for source in sources)
    stride = max(1, math.ceil(size / _SAMPLE_BYTES))
    split = split_documents(sources, [], share, options.seed, Counter(), workers)
    training = (document for which, document in split if which == TRAINING)
    counts: Counter[str] = Counter()
    shown = 0
    with work.progress("vocabulary", size, "B") as bar:
        count = functools.partial(_count_words, lower_case=options.lower_case)
        for found in workers.map(count, in_batches(islice(training, 0, None, stride))):
            counts.update(found)
            now = sum(source.position for source in sources)
            bar.update(now - shown)
            shown = now
    return counts


def _count_words(documents: list[Document], *, lower_case: bool) -> Counter[str]:
    return count_words(texts_of(documents, Counter()), lower_case=lower_case)
