"""`python -m stages.evaluate_mlp CHECKPOINT DATA --out DIR`: the accuracy of a saved MLP on images it never saw."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.files import sha256_of, write_json
from stages.directory.command import run
from stages.directory.manifest import Identity, Output, StageDirectory
from trainer.checkpoint.directory import MANIFEST
from trainer.checkpoint.load import load_into
from trainer.checkpoint.manager import require_valid
from trainer.checkpoint.resume_point import ResumePoint
from trainer.config import DEVICES
from trainer.data.order import Samples
from trainer.devices.base import Device
from trainer.devices.select import select_alone
from trainer.models.mlp import MLP
from trainer.parallel.tensor import TensorParallel
from trainer.state import TrainState
from trainer.workloads.mnist import HELD_OUT, Images


def evaluate(work: StageDirectory, model: MLP, images: Images, *, device: Device, batch_size: int) -> dict[str, Any]:
    """Measure `model` on all of `images`; the loss is a mean in nats, the accuracy a share of 1."""
    order = np.arange(len(images))
    sums, batches = np.zeros(2), 0
    model.to(device.torch_device).eval()
    began = time.monotonic()
    with work.progress("evaluate", len(images), "images") as bar, torch.no_grad():
        for batch in images.micro_batches(Samples(np.zeros_like(order), order), batch_size)[0]:
            batch = device.put(batch)
            guesses = model.log_probabilities(batch.images)
            batch_loss = torch.nn.functional.nll_loss(guesses, batch.labels, reduction="sum")
            batch_right = (guesses.argmax(-1) == batch.labels).sum()
            # One transfer: on a lazy device each value fetched alone is a graph of its own, forward pass included.
            sums += torch.stack([batch_loss, batch_right.to(batch_loss.dtype)]).tolist()
            batches += 1
            bar.update(len(batch.labels))
    rate = batches / (time.monotonic() - began)
    return {
        "images": len(images),
        "loss": sums[0] / len(images),
        "accuracy": sums[1] / len(images),
        "iterations_per_s": rate,
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m stages.evaluate_mlp",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a directory ckpt_<step> of --workload mnist")
    p.add_argument("data", type=Path, metavar="DATA", help=f"a directory with {', '.join(HELD_OUT)}")
    p.add_argument("--out", type=Path, required=True, help="stage directory to fill")
    p.add_argument("--batch-size", type=int, default=32, help="images in one forward pass")
    p.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    return p


def main() -> None:
    args = parser().parse_args()
    require_valid(args.checkpoint)
    images = Images(args.data, HELD_OUT)
    inputs = {"checkpoint": sha256_of(args.checkpoint / MANIFEST), "data": images.identity}
    with StageDirectory.begin(args.out, lambda: Identity("evaluate_mlp", 1, inputs=inputs)) as work:
        device = select_alone(args.device)
        model = MLP()
        start = ResumePoint(args.checkpoint, TrainState.read(args.checkpoint), weights_only=True)
        load_into(dict(model.named_parameters()), start, "model", vocab_size=0, ranks=TensorParallel())
        print("----------Evaluating---------------")
        counts = evaluate(work, model, images, device=device, batch_size=max(1, args.batch_size))
        print(f"Test throughput (iter/sec): {counts['iterations_per_s']}")
        print(f"Accuracy: {counts['accuracy']}")
        print("----------Done Evaluating---------------")
        report = work.path / "evaluation.json"
        write_json(report, counts)
        work.finish([Output.of(work.path, report)], counts)


if __name__ == "__main__":
    run(main)
