"""Pretraining BERT on shards of masked, paired examples."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from common.errors import UserError
from trainer.config import PRESETS, ModelConfig
from trainer.data.identity import content_identity
from trainer.data.reader import BatchReader
from trainer.data.shards import ShardSet
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.models.operations import Operations
from trainer.parallel.plan import require_divisible
from trainer.parallel.tensor import TensorParallel
from trainer.workloads.base import StepCost, Workload


class BertWorkload(Workload):
    losses = ("masked_lm_loss", "next_sentence_loss")

    def __init__(self, model: ModelConfig, shards: ShardSet) -> None:
        """Raises `UserError` if the rows are longer than the model's positions."""
        if shards.seq_len > model.max_position_embeddings:
            raise UserError(
                f"seq_len {shards.seq_len} is longer than the model's max_position_embeddings "
                f"{model.max_position_embeddings}; shorten the one or raise the other"
            )
        self.config = model
        self.vocab_size = model.vocab_size
        self.shards = shards
        self.rows_per_shard = shards.rows_per_shard

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        data = parser.add_argument_group("examples")
        data.add_argument("--seq_len", type=int, default=None, help="tokens in a row (default: what the shards have)")
        data.add_argument("--max_pred_len", type=int, default=20, help="masked positions in a row, at most")
        model = parser.add_argument_group("model")
        model.add_argument("--model", choices=PRESETS, default="large", help="a published size")
        model.add_argument(
            "--model_config", type=Path, default=None, help="a Hugging Face config.json instead of --model"
        )
        model.add_argument("--vocab_size", type=int, default=None, help="entries of the vocabulary (default: 30522)")
        model.add_argument("--disable_dropout", action="store_true", help="train without dropout")
        model.add_argument("--debug", action="store_true", help="the tutorials' toy model: 1 layer, 2 heads, hidden 16")
        train = parser.add_argument_group("phases")
        train.add_argument(
            "--max_steps", type=int, default=28125, help="optimizer steps in the phase (the schedule's end)"
        )
        train.add_argument("--phase2", action="store_true", help="second phase: starts from the weights of the first")
        train.add_argument("--phase1_end_step", type=int, default=28125, help="global step at which phase 1 ended")
        train.add_argument(
            "--tensor_parallel_size", type=int, default=1, help="workers that share one copy of the model"
        )

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        shards = ShardSet.open(args.data_dir.expanduser(), seq_len=args.seq_len, max_pred_len=args.max_pred_len)
        return cls(_model(args), shards)

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self.config)

    def make_model(self, operations: Operations, ranks: TensorParallel) -> BertForPreTraining:
        require_divisible(self.config, ranks.size)
        return BertForPreTraining(self.config, operations, ranks)

    def has_weight_decay(self, name: str) -> bool:
        return has_weight_decay(name)

    def identity(self, cache: Path, log: Callable[[str], None]) -> str:
        return content_identity(self.shards.directory, self.shards.names, cache, log)

    def reader(self, *, static_shapes: bool) -> BatchReader:
        return BatchReader(self.shards, vocab_size=self.config.vocab_size, static_shapes=static_shapes)

    def work(self, counts: Sequence[int]) -> StepCost:
        """A multiplication and an addition are two, and the backward pass is two forward passes, as in Narayanan et
        al. 2021, arXiv:2104.04473, appendix; embeddings, norms and softmax are not counted. The usual formula pads
        every sequence to S tokens and computes the masked-LM head at all of them.
        """
        masked, sequences, tokens, pairs = counts
        S, h, c = self.shards.seq_len, self.config.hidden_size, self.config
        a_token = c.num_hidden_layers * (8 * h**2 + 4 * h * c.intermediate_size)
        a_pair = c.num_hidden_layers * 4 * h
        a_prediction = 2 * h**2 + 2 * h * c.vocab_size
        a_sequence = 2 * h**2 + 4 * h
        needed = tokens * a_token + pairs * a_pair + masked * a_prediction + sequences * a_sequence
        usual = sequences * (S * (a_token + a_prediction) + S**2 * a_pair + a_sequence)
        return StepCost(sequences, 3.0 * needed, 3.0 * usual)

    def summary(self) -> dict[str, Any]:
        return {"max_length": self.shards.seq_len}


def _model(args: argparse.Namespace) -> ModelConfig:
    changes = {} if args.vocab_size is None else {"vocab_size": args.vocab_size}
    if args.model_config is not None:
        try:
            config = json.loads(args.model_config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"--model_config {args.model_config}: {error}; give a Hugging Face config.json") from error
        if not isinstance(config, dict):
            raise UserError(f"--model_config {args.model_config} is no JSON object; give a Hugging Face config.json")
        model = ModelConfig.of_hugging_face({**config, **changes})
    else:
        model = ModelConfig.preset("debug" if args.debug else args.model, **changes)
    return model.without_dropout() if args.disable_dropout else model
