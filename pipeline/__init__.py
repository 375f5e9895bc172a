"""What runs after what: `luigi --module pipeline BertPhase2`, or `MnistMlp`.

Imports neither torch nor transformers nor h5py: a finished pipeline answers in under a second.
"""

from common.process import print_in_any_locale
from pipeline import luigi_adapters
from pipeline.settings.load import add_defaults

add_defaults()
print_in_any_locale()
luigi_adapters.install()

from pipeline.tasks.bert import (  # noqa: E402 (the tasks read settings when they are made)
    BertPhase1,
    BertPhase2,
    ConvertCheckpoint,
    Evaluate,
    MergeShards,
    Precompile,
    Pretrain,
    Report,
)
from pipeline.tasks.dataset import DownloadDataset, ShardDataset, TokenizeCorpus  # noqa: E402
from pipeline.tasks.mnist import DownloadMnist, EvaluateMlp, MnistMlp, TrainMlp  # noqa: E402
from pipeline.tasks.nightly import Nightly  # noqa: E402

__all__ = [
    "BertPhase1",
    "BertPhase2",
    "ConvertCheckpoint",
    "DownloadDataset",
    "DownloadMnist",
    "Evaluate",
    "EvaluateMlp",
    "MergeShards",
    "MnistMlp",
    "Nightly",
    "Precompile",
    "Pretrain",
    "Report",
    "ShardDataset",
    "TokenizeCorpus",
    "TrainMlp",
]
