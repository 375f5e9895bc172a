"""What merging costs: a BERT-Large-sized checkpoint, split 8 ways, merged as `python -m stages.merge` does it.

Time: reading, joining, checking, hashing both sides, writing durably and loading with Hugging Face, against `cp` of the
same files on the same disk, and against the same work: `cp`, `sync`, since what `cp` leaves is not on the disk yet, and
`sha256sum` of source and copy at the same time, one process each. Once with files that must be read from the disk, once
with files that are in the page cache, where `cp` is a copy in memory. Runs alternate; starting Python and importing
torch and transformers takes the same for every size and is left out. Both sides begin the same time after the last
large deletion: a virtual machine gives free memory back to its host after some seconds, and writing into memory that
was freed just before can be seven times as fast. Memory: the peak of the command, less that of the same command on a
model of a hundredth of the size.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.processes import ROOT, python
from benchmarks.results import Result, say
from benchmarks.work import at_least
from common.secrets import Secret

SPLIT = 8
#: A model with the same tensors, and almost no size.
SMALL = {"hidden_size": 64, "intermediate_size": 256}
#: Seconds after which a kernel has given freed memory back to the host (it begins after two).
SETTLE_S = 10
#: The ratio to the same work that was asked for, and the claimed extra memory.
ASKED_RATIO, CLAIMED_EXTRA_MB = 1.2, 200


def make(directory: Path, *, small: bool) -> None:
    """Write a checkpoint of random parameters, split, into `directory`."""
    import torch

    from trainer.checkpoint.manager import CheckpointManager
    from trainer.checkpoint.snapshot import Snapshot
    from trainer.models.bert import BertForPreTraining
    from trainer.models.config import ModelConfig
    from trainer.state import TrainState

    config = ModelConfig.preset("large", **(SMALL if small else {}))
    model = BertForPreTraining(config)
    model.initialise(0)
    state = TrainState(
        phase=2, step=1, global_step=1, samples_consumed=0, epoch=0, seed=0, global_batch_size=1, data="",
        order_version=1, optimizer="AdamW", precision="fp32", model=vars(config), data_parallel_size=1,
        tensor_parallel_size=1, micro_batch_size=1, torch_version=torch.__version__,
    )  # fmt: skip
    whole = directory / "whole"
    whole.mkdir(parents=True)
    manager = CheckpointManager(whole, keep=-1)
    manager.save(Snapshot(state, {name: p.detach() for name, p in model.named_parameters()}, {}))
    manager.finish()
    size = ("--tensor-parallel-size", str(SPLIT))
    python("-m", "stages.convert", str(whole / "ckpt_1"), str(directory / "split"), *size)
    shutil.rmtree(whole)


def merge(source: Path, out: Path) -> None:
    """Merge in this process; print the seconds of the merge alone and the peak memory, as JSON."""
    import transformers.models.bert.modeling_bert  # noqa: F401 (its import is left out of the time)

    from stages import merge as stage
    from stages.directory.manifest import StageDirectory

    options = stage.MergeOptions(source=Secret.address(str(source)))
    time.sleep(SETTLE_S)
    with StageDirectory.begin(out, options.identity) as work:
        began = time.monotonic()
        stage.merge(work, options)
        seconds = time.monotonic() - began
    print(json.dumps({"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def evict(directory: Path) -> None:
    """Make the next read of a directory's files come from the disk."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of `cp`; and of `cp`, `sync` of what it wrote, and `sha256sum` of both."""
    time.sleep(SETTLE_S)
    began = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.monotonic() - began
    subprocess.run(["sync", *sorted(target.iterdir())], check=True)
    sums = [
        subprocess.Popen(["sha256sum", *sorted(side.iterdir())], stdout=subprocess.DEVNULL) for side in (source, target)
    ]
    assert not any(process.wait() for process in sums)
    return copied, time.monotonic() - began


def largest_bytes(merged: Path) -> int:
    from trainer.checkpoint.tensor_file import TensorFile

    return max(int(spec.bytes) for spec in TensorFile(merged / "model" / "model.safetensors").specs.values())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pairs", type=at_least(1), default=5, help="runs of each side, alternating")
    p.add_argument("--merge", nargs=2, type=Path, metavar=("IN", "OUT"), help=argparse.SUPPRESS)
    p.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.merge:
        merge(*args.merge)
        return
    if args.make:
        make(args.make, small=args.small)
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as name:
        compare(Path(name), args.pairs)


def compare(directory: Path, pairs: int) -> None:
    def merged(source: str, out: Path) -> dict[str, float]:
        words = ("-m", "benchmarks.stages.merge", "--merge", str(directory / source / "split" / "checkpoint"), str(out))
        found: dict[str, float] = json.loads(python(*words).splitlines()[-1])
        return found

    for size in ("small", "large"):
        python(
            "-m", "benchmarks.stages.merge", "--make", str(directory / size), *(["--small"] if size == "small" else [])
        )
    baseline = merged("small", directory / "out-small")["peak"]
    source, out = directory / "large" / "split" / "checkpoint", directory / "out"
    total = sum(path.stat().st_size for path in source.iterdir())
    print(f"BERT-Large, {total / 1e9:.2f} GB in {SPLIT} shards, {os.cpu_count()} cores")
    extras = []
    for where in ("on the disk", "in the page cache"):
        runs = []
        for _ in range(pairs):
            if where == "on the disk":
                evict(source)
            copied, worked = copy(source, directory / "copy")
            shutil.rmtree(directory / "copy")
            if where == "on the disk":
                evict(source)
            found = merged("large", out)
            largest = largest_bytes(out)
            shutil.rmtree(out)
            runs.append((found["seconds"], copied, worked))
            extras.append((found["peak"] - baseline - largest) / 1e6)
        merge_s, cp_s, all_s = (statistics.median(each) for each in zip(*runs, strict=True))
        for beside, side, asked in (("cp", 1, None), ("cp, sync and sha256sum", 2, ASKED_RATIO)):
            what = f"merging BERT-Large's {SPLIT} shards, {where}, beside {beside}"
            said = (f"merge {merge_s:.2f} s", f"cp {cp_s:.2f} s, with sync and sha256sum {all_s:.2f} s")
            each = tuple(run[0] / run[side] for run in runs)
            say(Result.median(what, *said, each, " ×", at_most=asked))
    said = (
        f"{max(extras) + largest / 1e6:.0f} MB more than a small model's",
        f"largest tensor {largest / 1e6:.0f} MB",
    )
    say(Result("merging: peak memory beyond the largest tensor", *said, max(extras), " MB", at_most=CLAIMED_EXTRA_MB))


if __name__ == "__main__":
    main()
