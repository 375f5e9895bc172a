"""What can be trained: a model with its data and its options, one file each. The loop sees only `base.Workload`."""

from __future__ import annotations

from trainer.workloads.base import Workload
from trainer.workloads.bert import BertWorkload
from trainer.workloads.mnist import MnistWorkload

#: By the name that `--workload` takes; the first is the default.
WORKLOADS: dict[str, type[Workload]] = {"bert": BertWorkload, "mnist": MnistWorkload}
