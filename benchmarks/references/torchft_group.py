"""A replica group of torchft_restarts: Hugging Face's BertForPreTraining and AdamW in torchft's fault-tolerant DDP.

The groups that take part share a step's micro-steps (--grad-accum, of all groups together), so that its batch is the
same however many groups there are. A restarted group takes its state from another group or, if there is none, from the
checkpoint in OUT, which is written every --save-steps steps. Appends "step seconds-since-1970" to OUT/steps at the end
of each step that was committed. The position in the data is not kept, as torchft's sampler does not keep it.
"""

# Annotations must not be strings: torch looks at those of `_comm_hook`.
import contextlib
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._C._distributed_c10d import GradBucket, TCPStore
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

from benchmarks.references.hugging_face import Rows, parser

TIMEOUT = timedelta(seconds=30)
#: Without retries, which is the default, all groups end if the lighthouse does.
QUORUM_RETRIES = 10


class Replicated(DistributedDataParallel):  # type: ignore[misc]
    @staticmethod
    def _comm_hook(manager: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """torchft 0.2.0's hook fails an assertion if another group dies during an all-reduce; later ones do not."""
        manager.allreduce(bucket.buffer()).wait()  # in place; after an error the manager does not commit the step
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced


class Group:
    """A group's model and optimizer, whose state torchft sends to other groups, and a checkpoint."""

    def __init__(self, config: dict[str, Any], name: str, out: Path) -> None:
        torch.manual_seed(0)
        self.model = transformers.BertForPreTraining(transformers.BertConfig(**config))
        self._adamw = torch.optim.AdamW(self.model.parameters(), lr=5e-5, weight_decay=0.01)
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=self._load, state_dict=self._state,
            min_replica_size=1, timeout=TIMEOUT, quorum_retries=QUORUM_RETRIES, replica_id=name, rank=0, world_size=1,
            store_addr="localhost", store_port=self._store.port, hostname="localhost",
        )  # fmt: skip
        self.replicated = Replicated(self.manager, self.model)
        self.optimizer = Optimizer(self.manager, self._adamw)
        self._checkpoint, self._unfinished = out / "checkpoint.pt", out / f"checkpoint-of-{name}.pt"

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._adamw.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._adamw.load_state_dict(state["optimizer"])

    def save(self) -> None:
        torch.save({"state": self._state(), "manager": self.manager.state_dict()}, self._unfinished)
        self._unfinished.replace(self._checkpoint)

    def resume(self) -> None:
        if self._checkpoint.exists():
            found = torch.load(self._checkpoint, weights_only=True)
            self._load(found["state"])
            self.manager.load_state_dict(found["manager"])

    def step(self, data: Iterator[dict[str, Any]], micro_steps: int) -> tuple[int, bool]:
        """Returns the step reached; whether it was committed and this group is the first of those that took part."""
        self.optimizer.zero_grad()  # starts asking who takes part
        rank, count = self.manager.participating_rank(), self.manager.num_participants()
        # A group that is getting its state from another takes part with zeros.
        own = len(range(rank, micro_steps, count)) if rank is not None else 1
        for left in reversed(range(own)):
            with self.replicated.no_sync() if left else contextlib.nullcontext():
                # The manager divides by `count`.
                (self.replicated(**next(data)).loss * count / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        before = self.manager.current_step()
        self.optimizer.step()  # does nothing unless all went well
        return self.manager.current_step(), self.manager.current_step() > before and rank == 0


def batches(rows: Rows, manager: Manager, *, group: int, groups: int, size: int) -> Iterator[dict[str, Any]]:
    """The group's share of the rows, over and over, each time in a different order."""
    sampler = DistributedSampler(
        rows, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=True
    )
    while True:
        sampler.set_epoch(manager.current_step())
        yield from torch.utils.data.DataLoader(rows, batch_size=size, sampler=sampler, drop_last=True)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--save-steps", type=int, required=True)
    p.add_argument("--group", type=int, required=True)
    p.add_argument("--groups", type=int, required=True)
    args = p.parse_args()
    args.out.mkdir(exist_ok=True)
    rows = Rows(args.data)
    group = Group(json.loads(args.model.read_text()), f"group_{args.group}", args.out)
    group.resume()
    data = batches(rows, group.manager, group=args.group, groups=args.groups, size=args.batch_size)
    while group.manager.current_step() < args.steps:
        step, is_first = group.step(data, args.grad_accum)
        if is_first:
            with (args.out / "steps").open("a") as file:
                file.write(f"{step} {time.time()}\n")
            if step % args.save_steps == 0:
                group.save()
    os._exit(0)  # the threads of its server would run on


if __name__ == "__main__":
    main()
