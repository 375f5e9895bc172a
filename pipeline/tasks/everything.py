"""All tasks that can be named on the command line, and a goal that requires all of them."""

from __future__ import annotations

from pipeline.settings.load import load
from pipeline.tasks.bert import (
    BertPhase1,
    BertPhase2,
    ConvertCheckpoint,
    Evaluate,
    MergeShards,
    Precompile,
    Pretrain,
    Report,
)
from pipeline.tasks.dataset import DownloadDataset, ShardDataset, TokenizeCorpus
from pipeline.tasks.goal import Goal
from pipeline.tasks.initial_weights import EmbedWords
from pipeline.tasks.mnist import DownloadMnist, EvaluateMlp, MnistMlp, TrainMlp
from pipeline.tasks.stage import Stage

#: In the order for help and documentation.
TASKS: tuple[type[Goal] | type[Stage], ...] = (
    *(BertPhase1, BertPhase2, MnistMlp),
    *(DownloadDataset, TokenizeCorpus, ShardDataset, EmbedWords, Precompile, Pretrain, ConvertCheckpoint),
    *(MergeShards, Evaluate, Report),
    *(DownloadMnist, TrainMlp, EvaluateMlp),
)
_MLP_LABELS = ("download_mnist", "train_mlp", "evaluate_mlp")


class Everything(Goal):
    """BERT, and the MLP if the work directory holds any of its stages."""

    def requires(self) -> dict[str, Stage]:
        goals: list[Goal] = [BertPhase2()]
        if any(list(load().work_dir.glob(f"{label}-*")) for label in _MLP_LABELS):
            goals.append(MnistMlp())
        return {name: task for goal in goals for name, task in goal.requires().items()}
