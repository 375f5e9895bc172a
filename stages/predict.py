"""`python -m stages.predict MODEL TEXT [TEXT]`: predict the [MASK] tokens, and whether the second text follows the
first. MODEL: a Hugging Face directory with its tokenizer, as written by stages.merge. A model without a next-sentence
head takes one text.
"""

from __future__ import annotations

import argparse
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.command_line import Parser
from common.errors import UserError
from stages.directory.command import run

#: Predictions shown per mask.
TOP = 5
#: What a BertForMaskedLM lacks.
_HEAD = {f"{name}.{kind}" for name in ("bert.pooler.dense", "cls.seq_relationship") for kind in ("weight", "bias")}


@dataclass(frozen=True)
class Prediction:
    """A model's predictions for one or two texts."""

    #: For each mask, in order: the most probable pieces of the vocabulary and their probabilities.
    fillings: list[list[tuple[str, float]]]
    #: Probability that the second text follows the first; None for one text.
    follows: float | None


def predict(model: Any, tokenizer: Any, texts: list[str]) -> Prediction:
    """Predict with Hugging Face's `BertForPreTraining` or `BertForMaskedLM` and its tokenizer; probabilities are
    softmaxes of the logits.

    Raises `UserError` for an empty text, a single text without a mask, two texts with a `BertForMaskedLM`, and texts
    with more tokens than the model has positions.
    """
    import torch

    has_head = hasattr(model.cls, "seq_relationship")
    if len(texts) == 2 and not has_head:
        raise UserError(
            f"two texts were given, but the model was trained without next-sentence prediction; give one with "
            f"{tokenizer.mask_token}"
        )

    encoded = tokenizer(*texts, return_tensors="pt")
    ids = encoded["input_ids"][0]
    most, special = model.config.max_position_embeddings, 1 + len(texts)
    if not all(text.strip() for text in texts):
        raise UserError("a text is empty; give one or two texts with words in them")
    if len(ids) > most:
        raise UserError(
            f"the text is too long: {len(ids)} tokens, {special} of them special, and the model takes {most}; "
            f"shorten it"
        )
    places = (ids == tokenizer.mask_token_id).nonzero()[:, 0]
    if len(texts) == 1 and not len(places):
        raise UserError(
            f"there is no {tokenizer.mask_token} in the text; put one in place of a word, or give two texts"
        )
    with torch.inference_mode():
        out = model(**encoded)
    words = out.prediction_logits if has_head else out.logits
    fillings = []
    for place in places:
        best = words[0, place].float().softmax(-1).topk(TOP)
        pieces = tokenizer.convert_ids_to_tokens(best.indices.tolist())
        fillings.append(list(zip(pieces, best.values.tolist(), strict=True)))
    # Class 0 means "is the next sentence", in our shards as in Hugging Face's model.
    follows = out.seq_relationship_logits[0].float().softmax(-1)[0].item() if len(texts) == 2 else None
    return Prediction(fillings, follows)


def load(directory: Path, tokenizer: Path) -> tuple[Any, Any]:
    """Load model and tokenizer with Hugging Face, offline, from these directories only: a `BertForPreTraining`, or a
    `BertForMaskedLM` if the weights lack the whole next-sentence head. Raises `UserError`."""
    # transformers reads these at import: no network access, and no warnings about unused features.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    if not (directory / "config.json").exists():
        raise UserError(f"{directory} is not a Hugging Face model: it has no config.json; give a directory with one")
    if not ((tokenizer / "tokenizer.json").exists() or (tokenizer / "vocab.txt").exists()):
        raise UserError(
            f"{tokenizer} has no tokenizer (the data came without one); give the directory of one with --tokenizer"
        )
    # What transformers will load: not Trainer's training_args.bin, and no pickle beside safetensors.
    preferred = ("model.safetensors", "model.safetensors.index.json")
    is_safe = any((directory / name).exists() for name in preferred)
    for weights in () if is_safe else sorted(directory.glob("pytorch_model*.bin")):
        from trainer.checkpoint.interop.sources import load_pickle

        load_pickle(weights)  # reports any fault in one line, and refuses contents that are too large
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.BertForPreTraining.from_pretrained(directory, output_loading_info=True)
        if set(info["missing_keys"]) == _HEAD:
            model, info = transformers.BertForMaskedLM.from_pretrained(directory, output_loading_info=True)
        pieces = transformers.BertTokenizerFast.from_pretrained(tokenizer)
    except Exception as error:  # a damaged model can raise anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(f"{directory} cannot be loaded: {reason}; give a whole model") from error
    if info["missing_keys"]:
        raise UserError(f"{directory} is not a whole BertForPreTraining: {min(info['missing_keys'])} is missing")
    if len(pieces) > model.config.vocab_size:
        raise UserError(
            f"{tokenizer} has {len(pieces)} pieces and the model {model.config.vocab_size}; give the model's own"
        )
    return model.eval(), pieces


def show(texts: list[str], prediction: Prediction) -> None:
    """Print the prediction."""
    print(" / ".join(texts))
    for number, best in enumerate(prediction.fillings, start=1):
        if len(prediction.fillings) > 1:
            print(f"mask {number}:")
        for piece, probability in best:
            print(f"  {probability:7.2%}  {piece}")
    if prediction.follows is not None:
        print(f"next sentence: {prediction.follows:.2%}, not: {1 - prediction.follows:.2%}")


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m stages.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face directory")
    p.add_argument("texts", nargs="+", metavar="TEXT", help="one text with [MASK], or two texts")
    p.add_argument("--tokenizer", type=Path, help="a tokenizer's directory (default: MODEL)")
    return p


def main() -> None:
    args = parser().parse_args()
    if len(args.texts) > 2:
        raise UserError(f"{len(args.texts)} texts were given; give one with [MASK], or two; quote each")
    model, tokenizer = load(args.model, args.tokenizer or args.model)
    show(args.texts, predict(model, tokenizer, args.texts))


if __name__ == "__main__":
    run(main)
