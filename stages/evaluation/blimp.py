"""BLiMP: which of two sentences, one of them ungrammatical, a model finds more probable (Warstadt et al. 2020).

A sentence's score is its pseudo-log-likelihood (Salazar et al. 2020, arXiv:1910.14659): each token is masked in turn,
and the log-probabilities that the model gives to the original tokens are summed. [CLS] and [SEP] are not scored.

B: rows in a batch, S: tokens in a row, [CLS] and [SEP] included.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import UserError, one_line
from stages.directory.manifest import StageDirectory
from stages.evaluation import BLIMP_SETS
from stages.transfer.archive import members
from trainer.data.bert_batch import IGNORED, BertBatch
from trainer.data.vocabulary import CLS, MASK, SEP
from trainer.devices.base import Device
from trainer.models.bert import BertForPreTraining
from trainer.parallel.fp32_sums import at_least_fp32

#: (good sentence, bad sentence) of each set.
PairsBySet = dict[str, list[tuple[str, str]]]

_KEYS = ("sentence_good", "sentence_bad")
#: The folder of its repository with other models' results, which are *.jsonl as well.
_RESULTS = "raw_results"
#: Limit on all sets together; BLiMP has 30 MB.
_BYTES_MAX = 256 << 20
#: Tokens per batch: on a CPU, larger batches are no faster; with 30,522 words, a batch's logits take 40 to 170 MB.
_TOKENS_AT_ONCE = 4096
#: On devices that compile each shape, rows are padded to a multiple of this.
_LENGTH_MULTIPLE = 8


def read_pairs(path: Path, samples: int) -> PairsBySet:
    """Read the first `samples` pairs (0: all) of each set: the *.jsonl of an archive or a folder, by file name.

    Raises `UserError`, one line, for anything else.
    """
    found: PairsBySet = {}
    left = _BYTES_MAX
    for name, content in _files(path):
        left -= len(content)
        if left < 0:
            raise UserError(f"{path} holds more than {_BYTES_MAX:,} bytes of *.jsonl; give a copy of BLiMP")
        lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        pairs = [_pair(f"{path}: line {number} of {name}", line) for number, line in lines[: samples or None]]
        if not pairs:
            raise UserError(f"{path}: {name} is empty; give a whole copy of BLiMP")
        found[PurePosixPath(name).stem] = pairs
    if not found:
        raise UserError(f"{path} holds no *.jsonl; give a copy of BLiMP, its archive or the folder of its sets")
    return dict(sorted(found.items()))


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the sets; a file that is too large is cut just above `_BYTES_MAX`."""
    if path.is_dir():
        for file in sorted(path.glob(BLIMP_SETS)):
            with file.open("rb") as opened:
                yield file.name, opened.read(_BYTES_MAX + 1)
        return
    for member in members(path):
        place = PurePosixPath(member.name)
        if fnmatch.fnmatchcase(place.name, BLIMP_SETS) and _RESULTS not in place.parts:
            yield place.name, member.read(_BYTES_MAX + 1)


def _pair(where: str, line: bytes) -> tuple[str, str]:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # a lone surrogate is valid JSON but not text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON in UTF-8 ({one_line(error)}); give a copy of BLiMP") from error
    good, bad = (record.get(key) for key in _KEYS) if isinstance(record, dict) else ("", "")
    if not (isinstance(good, str) and good.strip() and isinstance(bad, str) and bad.strip()):
        raise UserError(f"{where} lacks {' or '.join(_KEYS)}; a line is an object with both, as in BLiMP")
    return good, bad


def load_tokenizer(directory: Path, vocab_size: int) -> Any:
    """The `tokenizers.Tokenizer` beside a model of `vocab_size` entries. Raises `UserError`."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        raise UserError(
            f"{directory} has no tokenizer.json, without which sentences cannot be read; merge the model with "
            f"--tokenizer or --vocab-file ([corpus] vocab_file), or leave --blimp out"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{path} is not a tokenizer ({one_line(error)}); give the model's own") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = tokenizer.get_vocab_size()
    if size > vocab_size or any(tokenizer.token_to_id(token) is None for token in (CLS, SEP, MASK)):
        raise UserError(
            f"{path} has {size} pieces, the model {vocab_size}; {CLS}, {SEP} and {MASK} must be among them: give the "
            f"model's own tokenizer"
        )
    return tokenizer


@dataclass(frozen=True)
class Blimp:
    """The sets of BLiMP and a model's `tokenizers.Tokenizer`."""

    pairs: PairsBySet
    tokenizer: Any

    def scores(self, work: StageDirectory, model: BertForPreTraining, device: Device) -> dict[str, Any]:
        """The accuracy of `model`'s decisions over all pairs, and in each set. Raises `UserError`."""
        correct = self.correct(work, model, device)
        decisions = np.concatenate(list(correct.values()))
        return {
            "blimp_pairs": len(decisions),
            "blimp_accuracy": float(decisions.mean()),
            "blimp_accuracy_by_set": {name: float(found.mean()) for name, found in correct.items()},
        }

    def correct(self, work: StageDirectory, model: BertForPreTraining, device: Device) -> dict[str, NDArray[np.bool_]]:
        """Whether `model` finds the good sentence more probable, for each pair of each set; a tie counts as wrong.

        Raises `UserError` for a sentence with more tokens than the model has positions.
        """
        numbers: dict[tuple[int, ...], int] = {}  # each sentence is scored once, so equal ones tie exactly
        by_set = {
            name: np.array([numbers.setdefault(ids, len(numbers)) for ids in self._encoded(pairs)]).reshape(-1, 2)
            for name, pairs in self.pairs.items()
        }
        longest, most = max(map(len, numbers)), model.config.max_position_embeddings
        if longest > most:
            raise UserError(f"a sentence of BLiMP has {longest} tokens and the model takes {most}; leave --blimp out")
        mask = self.tokenizer.token_to_id(MASK)
        found = pseudo_log_likelihoods(work, model, list(numbers), mask, device)
        return {name: found[index[:, 0]] > found[index[:, 1]] for name, index in by_set.items()}

    def _encoded(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[int, ...]]:
        """The ids of the good and the bad sentence of each pair, in turn."""
        ends = self.tokenizer.token_to_id(CLS), self.tokenizer.token_to_id(SEP)
        sentences = [sentence for pair in pairs for sentence in pair]
        for sentence, encoding in zip(sentences, self.tokenizer.encode_batch(sentences), strict=True):
            ids = tuple(encoding.ids)
            if len(ids) < 3 or (ids[0], ids[-1]) != ends:
                raise UserError(
                    f"the model's tokenizer makes {encoding.tokens} of {sentence!r}; give one that adds {CLS} and {SEP}"
                )
            yield ids


def pseudo_log_likelihoods(
    work: StageDirectory, model: BertForPreTraining, sentences: list[tuple[int, ...]], mask: int, device: Device
) -> NDArray[np.float64]:
    """The pseudo-log-likelihood of each of `sentences`, token ids with [CLS] and [SEP]; (sentences,), in nats.

    Sentences of one length are scored together, so that no time is spent on padding.
    """
    lengths = np.array([len(ids) for ids in sentences])
    multiple = _LENGTH_MULTIPLE if device.static_shapes else 1
    padded = np.minimum(-(-lengths // multiple) * multiple, model.config.max_position_embeddings)
    scores = np.zeros(len(sentences))
    model.to(device.torch_device).eval()
    with work.progress("blimp", int((lengths - 2).sum()), "tokens") as bar, torch.no_grad():
        for length in np.unique(padded)[::-1]:
            of_length = np.flatnonzero(padded == length)
            ids = np.zeros((len(of_length), length), np.int64)
            for number, sentence in enumerate(of_length):
                ids[number, : lengths[sentence]] = sentences[sentence]
            scored = lengths[of_length] - 2
            rows = np.repeat(np.arange(len(of_length)), scored)
            places = 1 + np.arange(len(rows)) - np.repeat(np.cumsum(scored) - scored, scored)
            at_once = max(1, _TOKENS_AT_ONCE // int(length))
            for start in range(0, len(rows), at_once):
                row, place = rows[start : start + at_once], places[start : start + at_once]
                size = at_once if device.static_shapes else len(row)
                batch = device.put(masked_batch(ids[row], scored[row] + 2, place, mask, size))
                logits = at_least_fp32(model.logits(batch)[0])
                losses = torch.nn.functional.cross_entropy(
                    logits, batch.masked_labels, ignore_index=IGNORED, reduction="none"
                )
                gains = -losses.cpu().double().numpy()[: len(row)]
                scores[of_length] += np.bincount(row, weights=gains, minlength=len(of_length))
                bar.update(len(row))
    return scores


def masked_batch(
    ids: NDArray[np.int64], lengths: NDArray[np.int64], places: NDArray[np.int64], mask: int, size: int
) -> BertBatch:
    """The rows `ids` (B, S), padded after their `lengths` (B,) tokens, each masked at its position in `places` (B,).

    Copies of the first row, labelled `IGNORED`, fill the batch up to `size` rows.
    """
    count = len(ids)
    index = np.append(np.arange(count), np.zeros(size - count, np.int64))
    ids, lengths, places = ids[index], lengths[index], places[index]
    rows = np.arange(size)
    labels = np.where(rows < count, ids[rows, places], IGNORED)
    ids[rows, places] = mask
    seq_len = ids.shape[1]
    fields = {
        "input_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "sequence_ids": (np.arange(seq_len) < lengths[:, None]).astype(np.int64),
        "position_ids": np.arange(seq_len)[None],
        "masked_index": rows * seq_len + places,
        "masked_labels": labels,
        "first_index": np.zeros(1, np.int64),
        "next_sentence_labels": np.zeros(1, np.int64),
    }
    return BertBatch(**{name: torch.from_numpy(value) for name, value in fields.items()})
