"""The MLP's loss and accuracy on held-out images."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.directory.manifest import StageDirectory
from trainer.checkpoint.load import load_into
from trainer.checkpoint.resume_point import ResumePoint
from trainer.data.order import Samples
from trainer.devices.base import Device
from trainer.models.mlp import MLP
from trainer.parallel.tensor import TensorParallel
from trainer.state import TrainState
from trainer.workloads.mnist import Images


def evaluate(work: StageDirectory, model: MLP, images: Images, *, device: Device, batch_size: int) -> dict[str, Any]:
    """Evaluate `model` on all of `images`; the loss is a mean in nats, the accuracy in 0 … 1."""
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
            # One transfer: on a lazy device, each separate fetch compiles a graph of its own, forward pass included.
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


def load_model(checkpoint: Path) -> MLP:
    """Load the model of a `--workload mnist` checkpoint. Raises `CheckpointError`."""
    model = MLP()
    start = ResumePoint(checkpoint, TrainState.read(checkpoint), weights_only=True)
    load_into(dict(model.named_parameters()), start, "model", vocab_size=0, ranks=TensorParallel())
    return model
