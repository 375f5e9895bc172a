"""Tasks for the examples: download ready shards, or tokenize text once and build examples per phase."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import luigi

from common.errors import UserError
from common.files import write_json
from common.secrets import Secret
from pipeline.settings.origin import named_places
from pipeline.settings.sections import Settings
from pipeline.tasks.base import ChainTask
from pipeline.tasks.nights.parent import parent_of
from pipeline.tasks.stage import Stage
from stages.directory.manifest import Identity
from stages.shard import STATIC, ShardOptions
from stages.text.corpus import TokenizeOptions
from stages.text.patterns import split
from trainer.config import without_left_out
from trainer.data.mask_rate import MaskRate
from trainer.models.config import ModelConfig
from trainer.registry import STABLE_SCHEDULES

if TYPE_CHECKING:
    from stages.download import DownloadOptions

#: The model's config, as Hugging Face has it, in the directory of a stage that uses it.
CONFIG = "config.json"


def dataset_of(task: ChainTask, phase: int) -> Stage:
    """The stage that provides a phase's shards: a download if [dataset] names one, else a build from text.

    `task`: any task of the chain. Raises `UserError` if one trained phase would use downloaded shards, the other built
    ones.
    """
    download = task.sibling(DownloadDataset, phase=phase)
    with named_places(overlaid=bool(task.overlay)):
        _require_one_vocabulary(download.settings)
    return download if download.url else task.sibling(ShardDataset, phase=phase)


def mask_rate(task: ChainTask, phase: int) -> MaskRate | None:
    """The share of tokens that a phase's training masks as it reads; None: its shards are masked."""
    dataset = dataset_of(task, phase)
    settings = dataset.settings.phase(phase)
    if not isinstance(dataset, ShardDataset) or dataset.settings.dataset.masking == STATIC:
        return None
    return MaskRate.of(settings.masked_lm_prob, settings.final_masked_lm_prob)


def objective_options(task: ChainTask, phase: int) -> dict[str, Any]:
    """The trainer's options for its objective: how it masks what it reads, unless the shards are masked; which words
    the masked-LM loss is over; and what the next-sentence loss counts for."""
    rate, settings = mask_rate(task, phase), task.settings.phase(phase)
    weight = settings.next_sentence_weight if task.settings.dataset.next_sentence else 1.0
    losses = without_left_out({"sampled_softmax": settings.sampled_softmax, "next_sentence_weight": weight})
    if rate is None:
        return losses
    whole_words = dataset_of(task, phase).settings.dataset.whole_word_mask or None
    return {"masked_lm_prob": rate.first, "final_masked_lm_prob": rate.last, "whole_word_mask": whole_words, **losses}


def _require_one_vocabulary(settings: Settings) -> None:
    """Refuse to mix downloaded and built shards: downloaded ones lack their vocabulary, so no match can be checked."""
    dataset = settings.dataset
    if settings.phase2.start_from or bool(dataset.phase1_url) == bool(dataset.phase2_url):
        return
    given, empty = ("phase1_url", "phase2_url") if dataset.phase1_url else ("phase2_url", "phase1_url")
    raise UserError(
        f"[dataset] {given} is set and {empty} is empty: one phase would train on downloaded shards, the other on "
        f"[corpus] source, with two vocabularies; set both addresses or neither"
    )


class BuiltStage(Stage):
    """A stage that [cluster] build_nodes machines make together."""

    @property
    def nodes(self) -> int:
        return self.settings.cluster.build_nodes

    @property
    def is_on_cluster(self) -> bool:
        return self.nodes > 1

    @property
    def restarts(self) -> bool:
        return self.nodes > 1  # to make what a lost machine has not made


class TokenizeCorpus(BuiltStage):
    """Text → a vocabulary and token ids, once for both phases; held-out documents are kept apart first."""

    stored_as = "shards"

    def options(self) -> TokenizeOptions:
        corpus, run = self.settings.corpus, self.settings.run
        return TokenizeOptions(
            sources=tuple(split(corpus.source)),
            held_out_sources=tuple(split(corpus.held_out_source)),
            exclude=parent.held_out_tokens if (parent := parent_of(self.settings)) else None,
            vocab_file=Path(corpus.vocab_file) if corpus.vocab_file else None,
            vocab_size=corpus.vocab_size,
            lower_case=corpus.lower_case,
            held_out=corpus.held_out,
            seed=run.seed,
            document=corpus.document,
            max_unknown_share=corpus.max_unknown_share,
            processes=run.processes,
            builders=self.nodes,
        )

    @functools.cached_property
    def identity(self) -> Identity:
        try:
            return super().identity
        except UserError as error:
            given = {name: getattr(self.settings.corpus, name) for name in ("vocab_file", "held_out_source", "source")}
            # Not split as a shell does it, because that may be what failed.
            words = {name: re.split(r"[\s'\"]+", text) for name, text in given.items()}
            at = next((f" {name}:" for name in given if any(word in str(error) for word in words[name] if word)), "")
            with named_places(overlaid=bool(self.overlay)):
                raise UserError(f"[corpus]{at} {error}") from error


class ShardDataset(BuiltStage):
    """Token ids → the examples of one phase, as HDF5 shards."""

    stored_as = "shards"
    phase = luigi.IntParameter(description="1 or 2")

    def requires(self) -> dict[str, Stage]:
        return {"tokenize_corpus": self.sibling(TokenizeCorpus)}

    def options(self) -> ShardOptions:
        dataset, phase = self.settings.dataset, self.settings.phase(self.phase)
        return ShardOptions(
            tokens=self.sibling(TokenizeCorpus).directory,
            seq_len=phase.seq_len,
            max_pred_len=phase.max_pred_len,
            next_sentence=dataset.next_sentence,
            masking=dataset.masking,
            dupe_factor=dataset.dupe_factor,
            masked_lm_prob=phase.masked_lm_prob,
            short_seq_prob=dataset.short_seq_prob,
            whole_word_mask=dataset.whole_word_mask,
            pack=phase.pack,
            shards=dataset.shards,
            seed=self.settings.run.seed,
            phase=self.phase,
            processes=self.settings.run.processes,
            builders=self.nodes,
        )


class DownloadDataset(Stage):
    """Ready HDF5 shards of one phase, from an archive or a folder; every file checked."""

    stored_as = "shards"
    phase = luigi.IntParameter(description="1 or 2")

    @property
    def url(self) -> Secret:
        return self.settings.dataset.url(self.phase)

    def options(self) -> DownloadOptions:
        from stages.download import DownloadOptions

        if not self.url:
            raise UserError(f"[dataset] phase{self.phase}_url is empty; give an archive or a folder to download from")
        dataset, phase = self.settings.dataset, self.settings.phase(self.phase)
        return DownloadOptions(
            url=self.url,
            seq_len=phase.seq_len,
            max_pred_len=phase.max_pred_len,
            vocab_size=self.settings.model.downloaded_vocab_size,
            sha256=dataset.sha256(self.phase) or None,
            phase=self.phase,
            keep_archive=dataset.keep_archive,
            processes=self.settings.run.processes,
            **dataset.transport,
        )


class UsesModel(Stage):
    """A stage that needs the model's config."""

    imports_torch = True

    def vocabulary(self, phase: int) -> dict[str, Stage]:
        """The stage that provides the vocabulary and tokenizer; none for downloaded shards."""
        dataset = dataset_of(self, phase)
        return {} if isinstance(dataset, DownloadDataset) else dataset.requires()

    def model(self, phase: int) -> ModelConfig:
        """A phase's model from the settings and the vocabulary size; the vocabulary stage must be complete."""
        size = self.settings.model.downloaded_vocab_size
        for tokens in self.vocabulary(phase).values():
            size = tokens.counts()["vocab_size"]
        return dataclasses.replace(self.settings.model.config(size), next_sentence=self.next_sentence)

    def prepare(self) -> None:
        if (phase := getattr(self, "phase", None)) is not None:
            self.write_config(phase)

    def write_config(self, phase: int) -> None:
        """Write the phase's model into the directory, as Hugging Face's config."""
        write_json(self.directory / CONFIG, self.model(phase).to_hugging_face())

    def model_parameters(self) -> dict[str, Any]:
        """The model settings; a vocabulary size left open comes from the data set."""
        return {**self.settings.model.param_kwargs, **({} if self.next_sentence else {"next_sentence": False})}

    def objective_identity(self, phase: int) -> dict[str, Any]:
        """The parameters by which masks, the softmax and the weights of losses affect a phase's training."""
        rate, settings, objective = mask_rate(self, phase), self.settings.phase(phase), objective_options(self, phase)
        if rate is None:
            objective["max_pred_len"] = settings.max_pred_len
        elif rate.last != rate.first and settings.schedule in STABLE_SCHEDULES:
            objective["mask_schedule"] = 2  # 1: the rate fell from the first step on
        return {name: value for name, value in objective.items() if value}

    @property
    def next_sentence(self) -> bool:
        """Whether the model predicts next sentences too."""
        return self.settings.dataset.next_sentence

    @property
    def given_vocabulary(self) -> str:
        """Path of the vocab.txt that downloaded shards were made with, if the settings name it."""
        return "" if self.vocabulary(2) else self.settings.corpus.vocab_file

    def require_tokenizer(self, setting: str) -> None:
        """Raise `UserError` if `setting` needs the model's tokenizer and there is none."""
        if not self.vocabulary(2) and not self.given_vocabulary:
            raise UserError(
                f"{setting} needs the model's tokenizer, and ready shards come without their vocabulary; set [corpus] "
                f"vocab_file to it, or leave {setting} empty"
            )
