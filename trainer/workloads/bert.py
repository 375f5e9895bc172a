"""Pretraining BERT on shards of examples: masked-LM, and next-sentence prediction unless it is off."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from common.errors import UserError
from common.options import check, option
from trainer.config import without_left_out
from trainer.data.identity import content_identity
from trainer.data.mask_rate import MaskRate
from trainer.data.masking import DynamicMasking, Masking
from trainer.data.reader import BatchReader
from trainer.data.shards import NEXT_SENTENCE_KEY, ShardSet
from trainer.data.vocabulary import VOCABULARY_FILE, Vocabulary, read_vocabulary
from trainer.models.bert import BertForPreTraining, has_weight_decay, is_hidden_matrix
from trainer.models.config import PRESETS, ModelConfig
from trainer.models.initial import InitialValues
from trainer.models.neighbours import neighbour_weights, position_directions, scale_untrained
from trainer.models.operations import Operations
from trainer.models.word_embeddings import word_embeddings
from trainer.parallel.tensor import TensorParallel
from trainer.registry import INITIAL_ATTENTION, NEW_POSITIONS
from trainer.workloads.base import MASKED_LM_LOSS, StepCost, Workload

#: All embeddings begin this many times as large as BERT's where those of words are made from the text. AdamW changes an
#: element by about the learning rate at each step, whatever its size: those of rare words would soon be noise.
_GROWTH_OF_EMBEDDINGS = 2.0


@dataclass(frozen=True, kw_only=True)
class BertOptions:
    """The options that only this workload has."""

    option_separator: ClassVar[str] = "_"

    data_dir: Path = option(
        Path("~/examples_datasets/bert_pretrain_wikicorpus_tokenized_hdf5_seqlen128/"), group="data", decides=False,
        help="directory with the data set: *_training_*.hdf5 shards",
    )  # fmt: skip
    seq_len: int | None = option(
        None, group="data", least=1, unit="tokens", help="tokens in a row (default: the shards')"
    )
    max_pred_len: int = option(20, group="data", least=1, help="maximum masked positions in a row")
    masked_lm_prob: float | None = option(
        None, group="training", least=0.001, most=1,
        help="share of a sequence's tokens to predict, for shards that are masked when they are read (default: 0.15)",
    )  # fmt: skip
    final_masked_lm_prob: float | None = option(
        None, group="training", least=0.001, most=1,
        help="that share at the last step of the phase (default: --masked_lm_prob), approached linearly from the first "
        "step on; with --schedule wsd only in the decay, with constant never",
    )  # fmt: skip
    whole_word_mask: bool = option(
        False, group="training", help="mask all pieces of a word together, where shards are masked when they are read"
    )
    model: str = option("large", group="model", choices=tuple(PRESETS), help="a published size")
    model_config: Path | None = option(None, group="model", help="a Hugging Face config.json instead of --model")
    vocab_size: int | None = option(None, group="model", least=1, help="size of the vocabulary (default: 30522)")
    next_sentence: bool = option(
        True, group="model",
        help="predict next sentences too; else the model is a BertForMaskedLM, and labels in the shards are ignored",
    )  # fmt: skip
    word_embeddings: Path | None = option(
        None, group="model", metavar="FILE", decides=False,
        help="start from word embeddings and an output bias made from the data by stages.embed, instead of random and "
        "zero ones",
    )  # fmt: skip
    initial_attention: str = option(
        "random", group="model", choices=INITIAL_ATTENTION, decides=False,
        help="what heads attend to in the beginning: random, as in BERT; or neighbours: those of the first three "
        "layers to the token at one distance before or after, but two of the second to tokens with the same "
        "neighbour",
    )  # fmt: skip
    new_positions: str = option(
        "initial", group="model", choices=NEW_POSITIONS, decides=False,
        help="position embeddings that the shorter rows of an earlier phase left untrained: initial; or scaled: those "
        "of --initial_attention neighbours grow as the trained ones did; others are kept",
    )  # fmt: skip
    sampled_softmax: int = option(
        0, group="training", least=0, unit="words",
        help="the masked-LM loss of a micro-batch is over its own masked words and at least as many others, drawn at "
        "random, instead of the whole vocabulary; 0: the whole one",
    )  # fmt: skip
    next_sentence_weight: float = option(
        1.0, group="training", least=0.001, most=1000,
        help="with --next_sentence: factor of its loss in the sum that training minimises and logs as loss; "
        "next_sentence_loss is logged without it",
    )  # fmt: skip
    disable_dropout: bool = option(False, group="model", help="train without dropout")
    debug: bool = option(False, group="model", help="the tutorials' toy model: 1 layer, 2 heads, hidden size 16")

    def __post_init__(self) -> None:
        check(self)


def require_fitting(shards: ShardSet, model: ModelConfig) -> None:
    """Raise `UserError` if rows are longer than the model's positions, or have more segments than the model."""
    if shards.seq_len > model.max_position_embeddings:
        raise UserError(
            f"seq_len {shards.seq_len} is longer than the model's max_position_embeddings "
            f"{model.max_position_embeddings}; shorten the one or raise the other"
        )
    if model.type_vocab_size < 2 and shards.next_sentence:
        raise UserError(
            f"the model's type_vocab_size is {model.type_vocab_size}, but the shards in {shards.directory} hold "
            f"pairs of segments, which need 2; give a model with 2, or shards made with --no-next-sentence"
        )


class BertWorkload(Workload):
    options = BertOptions

    def __init__(
        self,
        model: ModelConfig,
        shards: ShardSet,
        masking: Masking | None = None,
        word_embeddings: Path | None = None,
        initial_attention: str = "random",
        new_positions: str = "initial",
        sampled_softmax: int = 0,
        next_sentence_weight: float = 1.0,
    ) -> None:
        """`masking`: for shards without masks; `word_embeddings`: a file with initial ones; `next_sentence_weight`: the
        factor of that loss.

        Raises `UserError` if the rows are longer than the model's positions, or lack the labels that the model needs.
        """
        require_fitting(shards, model)
        if model.next_sentence and not shards.next_sentence:
            raise UserError(
                f"the shards in {shards.directory} have no {NEXT_SENTENCE_KEY}, which the model's next-sentence head "
                f"needs; give --no-next_sentence, or shards with labels"
            )
        self.losses = {MASKED_LM_LOSS: 1.0}
        if model.next_sentence:
            self.losses["next_sentence_loss"] = next_sentence_weight
        self.config = model
        self.vocab_size = model.vocab_size
        self.shards = shards
        self.masking = masking
        self.word_embeddings = word_embeddings
        self.attends_to_neighbours = initial_attention == "neighbours"
        self.scales_new_positions = new_positions == "scaled"
        self.sampled_softmax = sampled_softmax
        self.rows_per_shard = shards.rows_per_shard

    @classmethod
    def of(cls, options: BertOptions) -> Self:
        if options.next_sentence_weight != 1 and not options.next_sentence:
            raise UserError(
                f"--next_sentence_weight {options.next_sentence_weight} goes with --next_sentence: without, there is "
                f"no such loss; leave out one of the two"
            )
        directory = options.data_dir.expanduser()
        shards = ShardSet.open(directory, seq_len=options.seq_len, max_pred_len=options.max_pred_len)
        masking = _masking(options, shards)
        begin = (options.word_embeddings, options.initial_attention, options.new_positions)
        return cls(model_of(options), shards, masking, *begin, options.sampled_softmax, options.next_sentence_weight)

    def describe(self) -> dict[str, Any]:
        return self.config.to_dict()

    def make_model(self, operations: Operations, ranks: TensorParallel) -> BertForPreTraining:
        self.config.require_divisible(ranks.size)
        return BertForPreTraining(self.config, operations, ranks, self.sampled_softmax)

    def initialise(self, model: BertForPreTraining, seed: int) -> None:
        """With the embeddings and output bias of `word_embeddings`, if given. Raises `UserError`."""
        given = neighbour_weights(self.config, InitialValues(seed)) if self.attends_to_neighbours else {}
        if self.word_embeddings is not None:
            given.update(word_embeddings(self.word_embeddings, self.config))
        model.initialise(seed, given)
        if self.attends_to_neighbours:
            model.bert.embeddings.keep_words_out_of(position_directions(self.config))
        if self.word_embeddings is not None:
            model.bert.embeddings.multiply(_GROWTH_OF_EMBEDDINGS)

    def begin_phase(self, model: BertForPreTraining, before: Mapping[str, Any]) -> str:
        if not self.scales_new_positions:
            return ""
        trained = before.get("seq_len")
        if trained is None:
            return (
                "the checkpoint does not say how long the rows of its training were: all position embeddings are kept"
            )
        if trained >= self.shards.seq_len:
            return ""
        return scale_untrained(model.bert.embeddings.position_embeddings.weight, trained, self.config)

    def has_weight_decay(self, name: str) -> bool:
        return has_weight_decay(name)

    def is_hidden_matrix(self, name: str) -> bool:
        return is_hidden_matrix(name)

    def identity(self, cache: Path) -> str:
        names = self.shards.names if self.masking is None else [*self.shards.names, VOCABULARY_FILE]
        return content_identity(self.shards.directory, names, cache)

    def settings(self) -> dict[str, Any]:
        weight = self.losses.get("next_sentence_loss", 1.0)
        given = {"sampled_softmax": self.sampled_softmax, "next_sentence_weight": weight}
        settings = {"seq_len": self.shards.seq_len, **without_left_out(given)}
        if self.masking is None:
            return settings
        return settings | {
            "masked_lm_prob": self.masking.rate.first,
            "final_masked_lm_prob": self.masking.rate.last,
            "whole_word_mask": self.masking.whole_words,
        }

    def reader(self, *, static_shapes: bool, without_padding: bool, seed: int, falling: range) -> BatchReader:
        masks = None
        if self.masking is not None:
            vocabulary = Vocabulary.of(read_vocabulary(self.shards.directory / VOCABULARY_FILE))
            masks = DynamicMasking(self.masking, vocabulary, seed=seed, falling=falling)
        return BatchReader(
            self.shards, vocab_size=self.config.vocab_size, static_shapes=static_shapes,
            without_padding=without_padding, dynamic_masking=masks,
        )  # fmt: skip

    def work(self, counts: Sequence[int], micro_batches: int) -> StepCost:
        """A multiply-add counts as two operations and the backward pass as two forward passes (Narayanan et al. 2021,
        arXiv:2104.04473, appendix); embeddings, norms and softmax are not counted. The usual formula pads every
        sequence to S tokens and computes the masked-LM head at all of them.
        """
        masked, sequences, tokens, pairs = counts
        words = self.config.vocab_size
        if self.sampled_softmax:
            words = min(words, masked // micro_batches + self.sampled_softmax)
        S, h, c = self.shards.seq_len, self.config.hidden_size, self.config
        a_value, after = 6 * h**2, 2 * h**2 + 4 * h * c.intermediate_size  # up to attention in a layer, and after it
        a_token = c.num_hidden_layers * (a_value + after)
        a_pair = c.num_hidden_layers * 4 * h
        a_transform, a_word = 2 * h**2, 2 * h
        a_sequence = 2 * h**2 + 4 * h if c.next_sentence else 0
        used = masked + (sequences if c.next_sentence else 0)
        needed = tokens * (a_token - after) + used * after + pairs * a_pair
        needed += masked * (a_transform + words * a_word) + sequences * a_sequence
        usual = sequences * (S * (a_token + a_transform + c.vocab_size * a_word) + S**2 * a_pair + a_sequence)
        return StepCost(sequences, 3.0 * needed, 3.0 * usual)

    def summary(self) -> dict[str, Any]:
        return {"max_length": self.shards.seq_len}


def _masking(options: BertOptions, shards: ShardSet) -> Masking | None:
    """How to mask `shards`; None: they are masked already. Raises `UserError` if options cannot be followed."""
    if shards.max_pred_len is not None:
        for name in ("masked_lm_prob", "final_masked_lm_prob", "whole_word_mask"):
            if getattr(options, name):
                raise UserError(
                    f"--{name} {getattr(options, name)}: the shards in {shards.directory} are masked already; leave it "
                    f"out, or make the shards without masks"
                )
        return None
    rate = MaskRate.of(options.masked_lm_prob, options.final_masked_lm_prob)
    return Masking(rate, whole_words=options.whole_word_mask)


def model_of(options: BertOptions) -> ModelConfig:
    """The model that the options describe. Raises `UserError`."""
    changes = {} if options.vocab_size is None else {"vocab_size": options.vocab_size}
    if options.model_config is not None:
        try:
            config = json.loads(options.model_config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"--model_config {options.model_config}: {error}; give a Hugging Face config.json"
            ) from error
        if not isinstance(config, dict):
            raise UserError(
                f"--model_config {options.model_config} is not a JSON object; give a Hugging Face config.json"
            )
        try:
            model = ModelConfig.of_hugging_face({**config, **changes})
        except UserError as error:
            raise UserError(f"--model_config {options.model_config}: {error}") from error
    else:
        model = ModelConfig.preset("debug" if options.debug else options.model, **changes)
    model = dataclasses.replace(model, next_sentence=options.next_sentence)
    return model.without_dropout() if options.disable_dropout else model
