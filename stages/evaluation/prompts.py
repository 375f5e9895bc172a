"""Prompts from held-out text: some that the model answers right, with other than the most frequent pieces, and a fair
sample of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stages.evaluation.blimp import masked_batch
from trainer.data.order import Samples
from trainer.data.reader import BatchReader, unmasked
from trainer.data.vocabulary import CLS, CONTINUATION, MASK, SEP, UNK
from trainer.devices.base import Device
from trainer.models.bert import BertForPreTraining
from trainer.parallel.fp32_sums import at_least_fp32

#: The most frequent pieces, which do not count as answers; the fewest and most tokens of a prompt; prompts that are
#: tried, and how many are kept.
FREQUENT, _SHORTEST, _LONGEST, _TRIED, _KEPT = 20, 6, 40, 4000, 5
#: Prompts of the sample.
_SAMPLED = 3
_ROWS, _AT_ONCE = 2000, 50
_ENDS = (".", "!", "?")
#: What stands in prose beside words and numbers; sentences with other signs (code, markup) are no prompts for people.
_SIGNS = (*_ENDS, ",", ";", ":")
#: How much more probable than the second the answer must be, so that another device's rounding cannot exchange them.
_AHEAD = 1.01


@dataclass(frozen=True)
class _Candidate:
    """A sentence, in ids, with one word masked."""

    text: str
    ids: list[int]
    place: int
    answer: int


def suggest(
    model: BertForPreTraining,
    tokenizer: Any,
    reader: BatchReader,
    samples: Samples,
    frequencies: NDArray[np.int64],
    device: Device,
) -> dict[str, list[dict[str, Any]]]:
    """Two lists. "prompts": {"prompt", "answer", "probability"} of the sentences in `samples` whose masked word the
    model predicts, the most probable first; [] if it predicts none but the `FREQUENT` most frequent pieces. "answers":
    the same and the masked word, "truth", of some of all the sentences that were tried, evenly spaced, right or wrong.

    `tokenizer`: the model's `tokenizers.Tokenizer`, which reads each prompt back as the tokens that were tried.
    `frequencies` (V,): how often each piece occurs.
    """
    frequent = set(np.argsort(-frequencies, kind="stable")[:FREQUENT].tolist())
    candidates = list(_candidates(tokenizer, _texts(reader, samples), frequent))
    width = min(_LONGEST + 2, model.config.max_position_embeddings)
    # A model may have more ids than its tokenizer: they take their share of the probability, but are no answers.
    unknown = torch.tensor([tokenizer.id_to_token(one) is None for one in range(model.config.vocab_size)])
    unknown = unknown.to(device.torch_device)
    mask, found, all_answers = tokenizer.token_to_id(MASK), list[tuple[float, _Candidate]](), list[dict[str, Any]]()
    model.to(device.torch_device).eval()
    for start in range(0, len(candidates), _AT_ONCE):
        part = candidates[start : start + _AT_ONCE]
        ids = np.zeros((len(part), width), np.int64)
        for row, candidate in enumerate(part):
            ids[row, : len(candidate.ids)] = candidate.ids
        lengths, places = (np.array(values) for values in zip(*((len(c.ids), c.place) for c in part), strict=True))
        batch = device.put(masked_batch(ids, lengths, places, mask, _AT_ONCE))
        with torch.no_grad():
            best = at_least_fp32(model.logits(batch)[0]).softmax(-1).masked_fill(unknown, -1.0).topk(2)
            # One transfer: on a lazy device, each separate fetch compiles a graph of its own.
            rows = torch.cat([best.values.double(), best.indices.double()], dim=1).tolist()
        for candidate, (probability, second, answer, _) in zip(part, rows, strict=False):
            all_answers.append(
                _answered(tokenizer, candidate, answer, probability)
                | {"truth": tokenizer.id_to_token(candidate.answer)}
            )
            if answer == candidate.answer and probability > _AHEAD * second:
                found.append((probability, candidate))
    middles = [(2 * number + 1) * len(all_answers) // (2 * _SAMPLED) for number in range(_SAMPLED)]
    sampled = [all_answers[at] for at in sorted(set(middles))] if all_answers else []
    return {"prompts": _best(found, tokenizer), "answers": sampled}


def _answered(tokenizer: Any, candidate: _Candidate, answer: float, probability: float) -> dict[str, Any]:
    piece = tokenizer.id_to_token(int(answer))
    return {"prompt": candidate.text, "answer": piece, "probability": round(probability, 6)}


def _best(found: list[tuple[float, _Candidate]], tokenizer: Any) -> list[dict[str, Any]]:
    """The most probable ones, each of another sentence and with another answer."""
    kept: list[dict[str, Any]] = []
    sentences, answers = set[tuple[int, ...]](), set[int]()
    for probability, one in sorted(found, key=lambda pair: -pair[0]):
        if tuple(one.ids) not in sentences and one.answer not in answers and len(kept) < _KEPT:
            sentences.add(tuple(one.ids))
            answers.add(one.answer)
            kept.append(_answered(tokenizer, one, one.answer, probability))
    return kept


def _texts(reader: BatchReader, samples: Samples) -> Iterator[list[int]]:
    """The tokens of each of the first rows, as they were before masking."""
    arrays = reader.read(samples[np.s_[:_ROWS]])
    for tokens, is_text in zip(unmasked(arrays), arrays["input_mask"].astype(bool), strict=True):
        yield tokens[is_text].tolist()


def _candidates(tokenizer: Any, texts: Iterator[list[int]], frequent: set[int]) -> Iterator[_Candidate]:
    """Prompts of whole sentences of prose, two a sentence at most, evenly placed: `_TRIED` at most."""
    cls, sep, tried = tokenizer.token_to_id(CLS), tokenizer.token_to_id(SEP), 0
    for text in texts:
        for sentence in _sentences(tokenizer, text):
            pieces = [tokenizer.id_to_token(one) for one in sentence]
            if not all(piece in _SIGNS or piece.removeprefix(CONTINUATION).isalnum() for piece in pieces):
                continue
            words = [
                at
                for at, (piece, after) in enumerate(zip(pieces, [*pieces[1:], ""], strict=True))
                if piece.isalpha() and not after.startswith(CONTINUATION) and sentence[at] not in frequent
            ]
            for at in words[len(words) // 3 :: max(1, len(words) // 2)][:2]:
                prompt = _prompt(tokenizer, pieces, at)
                whole = [cls, *sentence[:at], tokenizer.token_to_id(MASK), *sentence[at + 1 :], sep]
                if tokenizer.encode(prompt).ids == whole:  # typed, it is what is tried here
                    yield _Candidate(prompt, [cls, *sentence, sep], at + 1, sentence[at])
                    tried += 1
            if tried >= _TRIED:
                return


def _sentences(tokenizer: Any, text: list[int]) -> Iterator[list[int]]:
    """The sentences of a row of one or two segments that are whole, as far as punctuation tells, and have only ids that
    the tokenizer knows."""
    special = {tokenizer.token_to_id(piece) for piece in (CLS, SEP, UNK)}
    ends = {tokenizer.token_to_id(piece) for piece in _ENDS}
    sentence: list[int] = []
    for token in text:
        sentence.append(token)
        if token in ends or token in special or tokenizer.id_to_token(token) is None:
            first = tokenizer.id_to_token(sentence[0])
            if token in ends and _SHORTEST <= len(sentence) <= _LONGEST and not first.startswith(CONTINUATION):
                yield sentence
            sentence = []


def _prompt(tokenizer: Any, pieces: list[str], masked: int) -> str:
    """The text of `pieces`, the one at `masked` replaced by [MASK]."""
    text = ""
    for at, piece in enumerate(pieces):
        shown = MASK if at == masked else piece
        joins = shown.startswith(CONTINUATION) or shown in _SIGNS
        text += ("" if joins or not text else " ") + shown.removeprefix(CONTINUATION)
    return text
