"""Cost of checkpoints: a BERT-Large state (335 M parameters, fp32, two moments each) saved as in training.

Training stands still while weights and moments are checked, the steps' records are made durable and the state is
copied in memory; what several workers agree on before is left out. Allocating that memory (once, at the start),
writing, hashing and renaming run concurrently. The cost is relative to the training time between two checkpoints.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.processes import ROOT
from benchmarks.results import Result, say
from common.files import write_json
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
    optimizer = AdamW(FlatParameters(model, has_weight_decay, 2, Precision("fp32")), weight_decay=0.01)
    tensors = [tensor.detach() for tensor in (*model.parameters(), *optimizer.state().values())]
    for tensor in tensors:
        tensor.fill_(0.5)  # else the moments have no pages of their own yet, and reading them costs nothing
    state_bytes = sum(tensor.nbytes for tensor in tensors)
    before = peak_bytes()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as directory:
        manager, blocked, written = CheckpointManager(Path(directory), keep=1), [], []
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
            # What `Trainer.save` does before the copy; the file stands for the records.
            assert all(is_finite for _, is_finite in device.summaries(tensors))
            write_json(Path(directory) / "records.json", step)
            state = TrainState(
                phase=1, step=step, global_step=step, samples_consumed=0, epoch=0, seed=0, global_batch_size=1, data="",
                order_version=1, optimizer="AdamW", precision="fp32", model={}, data_parallel_size=1,
                tensor_parallel_size=1, micro_batch_size=1, torch_version=torch.__version__,
            )  # fmt: skip
            manager.save(copy.take(state, device.copy_to_host))
            blocked.append(time.monotonic() - began)
            manager.finish()
            written.append(time.monotonic() - began - blocked[-1])
    what = (
        f"a checkpoint of BERT-{args.model.capitalize()} every {args.interval_minutes:g} minutes: training stands still"
    )
    gigabytes, written_s = state_bytes / 1e9, statistics.median(written)
    said = (
        f"blocked {statistics.median(blocked):.2f} s for {gigabytes:.2f} GB",
        f"written, hashed and fsynced beside it in {written_s:.2f} s ({gigabytes / written_s:.2f} GB/s)",
    )
    shares = [100 * seconds / (60 * args.interval_minutes) for seconds in blocked]
    say(Result.median(what, *said, shares, " %", at_most=1))
    extra = peak_bytes() - before
    said = (f"{extra / 1e9:.2f} GB", f"the state {state_bytes / 1e9:.2f} GB")
    say(Result("host memory that saving needs", *said, extra / state_bytes, " ×", at_most=1.05))


if __name__ == "__main__":
    main()
