"""How many parameters a model has, and how many checkpoints a training keeps."""

from __future__ import annotations

from common.files import read_json
from pipeline.tasks.bert import Pretrain
from trainer.metrics.results import TRAIN_TIME
from trainer.models.config import ModelConfig


def parameter_count(model: ModelConfig) -> int:
    """Parameters of a BertForPreTraining, each tied one once; Devlin et al. 2018 (arXiv:1810.04805), section 3."""
    H, FF, V = model.hidden_size, model.intermediate_size, model.vocab_size
    norm = 2 * H
    embeddings = (V + model.max_position_embeddings + model.type_vocab_size) * H + norm
    layer = 4 * (H * H + H) + norm + (H * FF + FF) + (FF * H + H) + norm
    masked_lm = H * H + H + norm + V
    next_sentence = (H * H + H) + (2 * H + 2) if model.next_sentence else 0
    return embeddings + model.num_hidden_layers * layer + masked_lm + next_sentence


def checkpoints_kept(stage: Pretrain, left_s: float | None) -> int | None:
    """The most checkpoints at one time, with the one that is being written; None: not known.

    `left_s`: seconds of training that are left. Raises `UserError`.
    """
    phase = stage.settings.phase(stage.phase)
    if phase.num_ckpts_to_keep != -1:
        return max(1, phase.num_ckpts_to_keep) + 1
    steps, minutes = stage.max_steps, phase.ckpt_interval_minutes
    if steps is None or (minutes and left_s is None):
        return None
    every, by_time = phase.ckpt_interval_steps or steps, 0
    if minutes and left_s is not None:
        spent_s: float = (read_json(stage.directory / TRAIN_TIME) or {}).get(str(stage.phase), 0)
        by_time = int((spent_s + left_s) / steps * every / (60 * minutes))  # between two that are due by steps
    return 2 + steps // every * (1 + by_time)
