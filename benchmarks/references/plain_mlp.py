"""The other side: the MLP tutorial's loop, with torch's DataLoader, DistributedSampler and SGD. Prints its rate.

Images become tensors one by one on request, as torchvision's MNIST and ToTensor make them, through a Pillow image; with
--lean straight from the array, which the tutorial does not do.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from trainer.workloads.mnist import TRAINING, Images

BATCH, LEARNING_RATE, WARMUP = 32, 0.01, 2


class Digits(Dataset[tuple[Tensor, int]]):
    def __init__(self, directory: Path, *, lean: bool) -> None:
        images = Images(directory, TRAINING)
        self._pixels, self._labels = images.pixels.reshape(-1, 28, 28), images.labels.tolist()
        self._lean = lean

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self._pixels[index]
        if not self._lean:
            pixels = np.array(Image.fromarray(pixels), np.uint8, copy=True)
        image = torch.from_numpy(pixels).view(28, 28, 1).permute(2, 0, 1).contiguous()
        return image.to(torch.float32).div(255), self._labels[index]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("data", type=Path)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--lean", action="store_true")
    p.add_argument("--threads", type=int, default=1, help="of a worker; more make it slower")
    args = p.parse_args()
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    data = Digits(args.data, lean=args.lean)
    sampler: DistributedSampler[tuple[Tensor, int]] | None = DistributedSampler(data) if workers > 1 else None
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, shuffle=sampler is None)
    model = nn.Sequential(
        nn.Linear(784, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10), nn.LogSoftmax(dim=1)
    )
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * workers), nn.NLLLoss()
    for _ in range(args.epochs):
        for index, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model(images.view(images.size(0), -1)), labels)
            loss.backward()
            if workers > 1:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= workers
            optimizer.step()
            if index < WARMUP:
                began, first = time.perf_counter(), index
    if int(os.environ.get("RANK", "0")) == 0:
        print((index - first) / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
