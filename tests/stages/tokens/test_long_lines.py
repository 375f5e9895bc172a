"""Very long lines: split into sentences and words in linear time, and into the right ids."""

from __future__ import annotations

import functools
import importlib
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencex import segment

from stages.text.sentences import _WINDOW_CHARACTERS, _segments, sentences
from stages.tokens.wordpiece import Encoder, save_tokenizer
from trainer.data.vocabulary import SPECIAL_TOKENS

_DRAW = random.Random(0)
_CHINESE = [chr(_DRAW.randrange(0x4E00, 0x9FA5)) for _ in range(3000)]


def chinese(count: int) -> str:
    return "".join(_DRAW.choices([*_CHINESE, *"。" * 150, *"，" * 150], k=count))


LINES: dict[str, Callable[[int], str]] = {
    "Chinese": chinese,
    "Chinese without an end": lambda count: "".join(_DRAW.choices(_CHINESE, k=count)),
    "Chinese with quotes": lambda count: ("「" + chinese(30) + "」他说。") * (count // 35),
    "Thai": lambda count: "".join(_DRAW.choices([chr(code) for code in range(0xE01, 0xE2E)], k=count)),
    "one word": lambda count: "a" * count,
    "punctuation": lambda count: "".join(_DRAW.choices("!?.,;()[]", k=count)),
    "dots": lambda count: "." * count,
    "accents": lambda count: "e" + "\u0301" * (count - 1),
    "names": lambda count: "tkinter.Tk()" * (count // 12),
    "English": lambda count: "The cat sat. It slept! " * (count // 23),
}


def cpu_seconds(action: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    action()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Encoder, Any]:
    """Our encoder, and Hugging Face's tokenizer with the same vocabulary."""
    directory = tmp_path_factory.mktemp("tokenizer")
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = [
        *SPECIAL_TOKENS,
        *letters,
        *(f"##{letter}" for letter in letters),
        *"!?.,;()[]。，「」",
        *_CHINESE[:2000],
    ]
    vocabulary = list(dict.fromkeys([*vocabulary, *_CHINESE[:2000]]))
    save_tokenizer(directory, vocabulary, lower_case=True)
    transformers: Any = importlib.import_module("transformers")
    return Encoder(vocabulary, lower_case=True), transformers.BertTokenizerFast.from_pretrained(Path(directory))


@pytest.mark.parametrize("kind", LINES)
def test_a_line_is_split_and_encoded_in_linear_time(kind: str, tokenizers: tuple[Encoder, Any]) -> None:
    """Twenty times as many characters take twenty times as long, not 400 times; the better of two measurements."""

    def encode(line: str) -> None:
        tokenizers[0].encode(sentences(line))

    lines = [LINES[kind](n) for n in (16_000, 320_000)]
    short, long = (min(cpu_seconds(functools.partial(encode, line)) for _ in range(2)) for line in lines)
    assert long < 2 * 20 * short


@pytest.mark.parametrize("kind", LINES)
def test_the_ids_of_long_lines_are_hugging_faces(kind: str, tokenizers: tuple[Encoder, Any]) -> None:
    ours, reference = tokenizers
    found = sentences(LINES[kind](30_000))
    ids, lengths = ours.encode(found)
    expected = [reference(sentence, add_special_tokens=False, verbose=False)["input_ids"] for sentence in found]
    assert list(lengths) == list(map(len, expected))
    assert np.array_equal(ids, [token for sentence in expected for token in sentence])


@pytest.mark.parametrize("kind", LINES)
def test_windows_lose_and_add_nothing(kind: str) -> None:
    line = LINES[kind](50_000)
    found = list(_segments(line))
    assert "".join(found) == line
    assert all(found)
    short = line[:_WINDOW_CHARACTERS]
    assert list(_segments(short)) == list(segment("en", short))


def test_sentences_do_not_depend_on_where_a_window_ends() -> None:
    text = 'The cat sat. Dr. Smith (of 3.5 Main St.) said "No. Never." He left! ' * 1000
    assert len(text) > 5 * _WINDOW_CHARACTERS
    assert list(_segments(text)) == list(segment("en", text))
    draw = random.Random(1)
    chinese_text = "".join("".join(draw.choices(_CHINESE, k=draw.randrange(3, 60))) + "。" for _ in range(1500))
    assert list(_segments(chinese_text)) == list(segment("en", chinese_text))
