"""Cost of checkpoints: a BERT-Large state (335 M parameters, fp32, two moments each) saved as in training.

Training blocks only while the state is copied in memory; allocating that memory (once, at the start), writing, hashing
and renaming run concurrently. The cost is relative to the training time between two checkpoints.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import Result, say
from benchmarks.work import ROOT
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.snapshot import HostCopy
from trainer.devices.cpu import CpuDevice
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.models.config import ModelConfig
from trainer.optim.adamw import AdamW
from trainer.optim.parameters import FlatParameters
from trainer.precision import Precision
from trainer.state import TrainState


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--interval-minutes", type=float, default=10.0, help="training between two checkpoints")
    p.add_argument("--saves", type=int, default=3)
    p.add_argument("--model", default="large")
    args = p.parse_args()
    model = BertForPreTraining(ModelConfig.preset(args.model))
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    optimizer = AdamW(FlatParameters(model, has_weight_decay, 2, Precision("fp32")), weight_decay=0.01)
    state_bytes = sum(t.numel() * 4 for t in (*model.parameters(), *optimizer.state().values()))
    before = peak_bytes()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as directory:
        manager, shares = CheckpointManager(Path(directory), keep=1), []
        device = CpuDevice()
        began = time.monotonic()
        copy = HostCopy(dict(model.named_parameters()), optimizer.state(), device.host_memory)
        manager.begin(copy.touch)
        started = time.monotonic() - began
        manager.finish()
        touched = time.monotonic() - began
        print(f"at the start: blocked {started:.2f} s, memory claimed beside it in {touched:.2f} s")
        for step in range(1, args.saves + 1):
            began = time.monotonic()
            state = TrainState(
                phase=1, step=step, global_step=step, samples_consumed=0, epoch=0, seed=0, global_batch_size=1, data="",
                order_version=1, optimizer="AdamW", precision="fp32", model={}, data_parallel_size=1,
                tensor_parallel_size=1, micro_batch_size=1, torch_version=torch.__version__,
            )  # fmt: skip
            manager.save(copy.take(state, device.copy_to_host))
            blocked = time.monotonic() - began
            manager.finish()
            written = time.monotonic() - began - blocked
            shares.append(100 * blocked / (60 * args.interval_minutes))
            said = (
                f"blocked {blocked:.2f} s for {state_bytes / 1e9:.2f} GB",
                f"written, hashed and fsynced beside it in {written:.2f} s ({state_bytes / 1e9 / written:.2f} GB/s)",
            )
    what = (
        f"a checkpoint of BERT-{args.model.capitalize()} every {args.interval_minutes:g} minutes: training stands still"
    )
    say(Result(what, *said, statistics.median(shares), " %", at_most=1, each=tuple(shares)))
    extra = peak_bytes() - before
    said = (f"{extra / 1e9:.2f} GB", f"the state {state_bytes / 1e9:.2f} GB")
    say(Result("host memory that saving needs", *said, extra / state_bytes, " ×", at_most=1.05))


if __name__ == "__main__":
    main()
