"""What the phases start from, if phase 1 not from BERT's random weights and phase 2 not just from phase 1's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.tasks.base import ChainTask
from pipeline.tasks.dataset import dataset_of
from pipeline.tasks.nights.parent import parent_of
from pipeline.tasks.stage import Stage
from stages.embed import COOCCURRENCE, EMBEDDINGS, EmbedOptions
from trainer.models.config import ModelConfig
from trainer.registry import INITIAL_ATTENTION, NEW_POSITIONS


class EmbedWords(Stage):
    """Makes phase 1's initial word embeddings from the text."""

    stored_as = "shards"
    imports_torch = True

    def requires(self) -> dict[str, Stage]:
        return {"dataset": dataset_of(self, 1)}

    def options(self) -> EmbedOptions:
        hidden_size = self.settings.model.config(ModelConfig().vocab_size).hidden_size  # whatever the vocabulary's size
        return EmbedOptions(data=dataset_of(self, 1).directory, hidden_size=hidden_size, seed=self.settings.run.seed)

    @property
    def file(self) -> Path:
        return self.directory / EMBEDDINGS


def embedded(task: ChainTask, phase: int) -> dict[str, EmbedWords]:
    """The stage that makes a phase's initial word embeddings, by its role; none if they are random or another phase's.

    `task`: any task of the chain.
    """
    task = task.sibling(EmbedWords)
    return {"word_embeddings": task} if phase == 1 and task.settings.phase1.word_embeddings == COOCCURRENCE else {}


def first_positions(task: ChainTask, phase: int) -> dict[str, str]:
    """The trainer's option for the positions that a phase begins with; none if it is the trainer's default."""
    name, default = ("initial_attention", INITIAL_ATTENTION[0]) if phase == 1 else ("new_positions", NEW_POSITIONS[0])
    value = getattr(task.settings.phase(phase), name)
    return {} if value == default else {name: value}


def start_options(task: ChainTask, phase: int) -> dict[str, Any]:
    """The trainer's options for a phase's initial weights."""
    parent = parent_of(task.settings) if phase == 1 else None
    if parent is not None:
        return {"resume_ckpt_path": parent.checkpoint, "new_data": True}
    return {**first_positions(task, phase), **{role: made.file for role, made in embedded(task, phase).items()}}


def start_inputs(task: ChainTask, phase: int) -> dict[str, Any]:
    """The identity of the night that a phase continues; empty if it continues none."""
    parent = parent_of(task.settings) if phase == 1 else None
    return {"start_from": parent.identity} if parent is not None else {}
