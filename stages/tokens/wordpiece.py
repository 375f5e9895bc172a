"""WordPiece: learning, reading and writing a vocabulary, and fast encoding of sentences.

The ids equal those of Hugging Face's BertTokenizerFast without special tokens: the same library normalises every
character and splits every word, but each only once; the rest is dictionary look-ups and numpy. (Text that spells a
special token, such as "[MASK]", is encoded as ordinary text.)
"""

from __future__ import annotations

import json
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.files import durable_file
from trainer.data.vocabulary import CLS, CONTINUATION, SEP, SPECIAL_TOKENS, UNK

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Distinct words cached by an encoder, about 150 bytes each.
_CACHED_WORDS = 400_000
_ALPHABET_MAX = 1000  # single characters in a learned vocabulary; the default of the tokenizers library
#: Longer words are [UNK], as in the original BERT.
_WORD_CHARACTERS_MAX = 100
_TOO_LONG = "\x01"  # like _SEPARATOR, never a word of a text
_SEPARATOR = "\x00"  # never a word of a text: the normaliser removes it


class _Characters(dict[int, str]):
    """A `str.translate` table that normalises text and puts spaces between words, filled lazily from the library.

    Normalising (clean, space around CJK, strip accents, lower-case) and splitting (at white space and punctuation)
    look at one character at a time, so a table per character is exact; `reorders` marks the exception.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__({ord("\n"): f" {_SEPARATOR} "})
        self._normalizer, self._splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
        #: Whether spacing marks were seen, whose order canonical decomposition may change.
        self.reorders = False

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if unicodedata.combining(character) and unicodedata.category(character) != "Mn":
            self.reorders = True
        pieces = self._splitter.pre_tokenize_str(self._normalizer.normalize_str(f"a{character}a"))
        result = self[code] = " ".join(piece for piece, _ in pieces)[1:-1]
        return result


#: The file of a tokenizer that is written last.
LAST_FILE = "special_tokens_map.json"


class WordSplitter:
    """Splits sentences into normalised words, adding a separator word after each sentence."""

    def __init__(self, *, lower_case: bool) -> None:
        self._characters = _Characters(_untrained(lower_case=lower_case))
        self._lower_case = lower_case

    def words(self, sentences: list[str]) -> list[str]:
        text = "\n".join([*sentences, ""])
        result = text.translate(self._characters)
        if self._characters.reorders and self._lower_case:
            result = unicodedata.normalize("NFD", text).translate(self._characters)
        return result.split()


class _Words(dict[str, int]):
    """Word → index into `starts` and `lengths`, which locate its ids in `pieces`; tokenizes each word once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self.pieces = array("I")
        self.starts = array("Q")
        self.lengths = array("H")
        self._add(_SEPARATOR, [])
        self._add(_TOO_LONG, [token.id for token in model.tokenize("a" * (_WORD_CHARACTERS_MAX + 1))])

    def __missing__(self, word: str) -> int:
        if len(word) > _WORD_CHARACTERS_MAX:  # [UNK] in any vocabulary; caching it would cost memory
            return self[_TOO_LONG]
        return self._add(word, [token.id for token in self._model.tokenize(word)])

    def _add(self, word: str, ids: list[int]) -> int:
        number = self[word] = len(self.starts)
        self.starts.append(len(self.pieces))
        self.lengths.append(len(ids))
        self.pieces.extend(ids)
        return number


class Encoder:
    """Encodes sentences as ids of one vocabulary."""

    def __init__(self, vocabulary: list[str], *, lower_case: bool) -> None:
        self._model = build_tokenizer(vocabulary, lower_case=lower_case).model
        self._splitter = WordSplitter(lower_case=lower_case)
        self._words = _Words(self._model)

    def encode(self, sentences: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """The concatenated ids of all sentences, (tokens,), and the number of ids of each, (sentences,)."""
        if len(self._words) > _CACHED_WORDS:
            self._words = _Words(self._model)
        words = self._splitter.words(sentences)
        numbers = np.fromiter(map(self._words.__getitem__, words), np.int64, len(words))
        lengths = np.frombuffer(self._words.lengths, np.uint16)[numbers].astype(np.int64)
        ends = np.cumsum(lengths)
        starts = np.frombuffer(self._words.starts, np.uint64).astype(np.int64)[numbers]
        indices = np.repeat(starts - (ends - lengths), lengths)
        indices += np.arange(len(indices))
        ids = np.frombuffer(self._words.pieces, np.uint32)[indices]
        return ids, np.diff(ends[numbers == 0], prepend=0)

    def unknown_words(self, sentences: list[str]) -> list[str]:
        """The words of `sentences` that the vocabulary cannot spell."""
        words = [word for word in self._splitter.words(sentences) if word != _SEPARATOR]
        return [word for word in words if self._model.tokenize(word)[0].value == UNK]


def _untrained(*, lower_case: bool) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def build_tokenizer(vocabulary: list[str], *, lower_case: bool) -> Tokenizer:
    """BERT's `tokenizers.Tokenizer` with this vocabulary, as stored in `tokenizer.json`."""
    from tokenizers import decoders, models, processors

    tokenizer = _untrained(lower_case=lower_case)
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer.model = models.WordPiece(ids, unk_token=UNK, max_input_chars_per_word=_WORD_CHARACTERS_MAX)
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS}:0 $A:0 {SEP}:0",
        pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
        special_tokens=[(CLS, ids[CLS]), (SEP, ids[SEP])],
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def count_words(texts: Iterable[str], *, lower_case: bool) -> Counter[str]:
    """Count the words of `texts`."""
    counts = Counter(WordSplitter(lower_case=lower_case).words(list(texts)))
    del counts[_SEPARATOR]
    return counts


def learn_vocabulary(counts: Counter[str], *, size: int) -> list[str]:
    """Learn a vocabulary of at most `size` pieces from word counts, deterministically.

    Special tokens come first (ids 0 to 4), then single characters, then pieces in merge order.
    Raises `UserError` if `size` is too small for the single characters.
    """
    # The library numbers continuing characters in the order of a randomly seeded hash table and breaks ties by these
    # numbers, so every run would learn a different vocabulary. Listing all characters up front fixes their order.
    starting: Counter[str] = Counter()
    continuing: Counter[str] = Counter()
    for word, count in counts.items():
        starting[word[0]] += count
        for character in word[1:]:
            continuing[character] += count
    kept = _most_common(starting + continuing, _ALPHABET_MAX)
    alphabet = [*sorted(kept), *(CONTINUATION + character for character in sorted(kept & continuing.keys()))]
    if size < len(SPECIAL_TOKENS) + len(alphabet):
        raise UserError(
            f"a vocabulary of {size} pieces cannot hold the {len(alphabet)} single characters of this text and "
            f"{len(SPECIAL_TOKENS)} special tokens; give --vocab-size {2 * len(alphabet)} or more"
        )
    return _merge(counts, alphabet, sorted(kept), size)


def _most_common(counts: Counter[str], limit: int) -> set[str]:
    return {character for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]}


def _merge(counts: Counter[str], alphabet: list[str], characters: list[str], size: int) -> list[str]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *alphabet],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
        continuing_subword_prefix=CONTINUATION,
    )
    tokenizer.train_from_iterator(_repeated(counts), trainer)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(ids, key=ids.__getitem__)


def _repeated(counts: Counter[str]) -> Iterator[str]:
    """Repeat every word as often as it was counted, in strings of bounded length; the library counts text itself."""
    for word, count in counts.items():
        for start in range(0, count, 4096):
            yield f"{word} " * min(4096, count - start)


def save_tokenizer(directory: Path, vocabulary: list[str], *, lower_case: bool) -> list[Path]:
    """Write the files that `transformers.BertTokenizerFast.from_pretrained(directory)` reads; returns their paths.

    Does not import transformers, which takes seconds.
    """
    special = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    configuration = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lower_case,
        "model_max_length": 512,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        **special,
    }
    files = {
        "vocab.txt": "\n".join(vocabulary),
        "tokenizer.json": build_tokenizer(vocabulary, lower_case=lower_case).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(configuration, indent=2),
        LAST_FILE: json.dumps(special, indent=2),
    }
    for name, content in files.items():
        with durable_file(directory / name) as file:
            file.write(content.encode() + b"\n")
    return [directory / name for name in files]
