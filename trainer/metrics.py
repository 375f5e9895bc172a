"""What a run says about itself: the console line, TensorBoard, metrics.jsonl, the summary."""

from __future__ import annotations

import collections
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import METRICS, PROGRESS, disk_errors, failpoint, read_json, replace_json, write_json
from trainer.config import TrainConfig
from trainer.event_file import EventFile
from trainer.results import TrainTime, phase_results, recorded_steps, steps_of_phase
from trainer.state import TrainState
from trainer.workloads.base import StepCost, Workload

#: Steps over which the throughput is averaged, as in the tutorials' script.
THROUGHPUT_WINDOW = 10
#: Seconds between two writes of what others look at while it runs; steps that are slower are written one by one.
_WRITE_INTERVAL_S = 1.0
#: Seconds between two points of the curves in TensorBoard, which draws a thousand at most; metrics.jsonl has all.
_BOARD_INTERVAL_S = 0.05

#: json.dumps would make an encoder for each line.
_encode = json.JSONEncoder(allow_nan=False).encode


@dataclass(frozen=True)
class StepRecord:
    """What is known of a finished step before its losses are read from the device."""

    state: TrainState
    learning_rate: float
    #: What the reader has counted in the global batch.
    counts: Sequence[int]
    #: Graphs compiled by then, on devices that compile.
    compiled_graphs: int | None = None


class Metrics:
    """The records of a run, written by the root worker; the others only check their losses."""

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        start: TrainState,
        *,
        peak_flops_per_s: float | None,
        is_root: bool,
        say: Callable[[str], None],
    ) -> None:
        """`peak_flops_per_s`: of all workers' devices together, None where it is not known.

        Goes on behind the records of `start`'s steps in the output directory; later ones there are dropped, because
        their steps are done again. Where nothing is left to train they are of something else, and stay.
        """
        self._config = config
        self._workload = workload
        self._say = say
        self._is_root = is_root
        self._peak_flops_per_s = peak_flops_per_s
        self._last = time.monotonic()
        self._written = self._drawn = 0.0
        #: The first step of the phase, from 0, that was not finite, and what is to be said of it.
        self.not_finite: tuple[int, str] | None = None
        #: Recorded, and not written yet.
        self._lines: list[str] = []
        self._progress: dict[str, Any] = {}
        #: (seconds, work) of the latest steps.
        self._recent: collections.deque[tuple[float, StepCost]] = collections.deque(maxlen=THROUGHPUT_WINDOW)
        if not is_root:
            return
        self._path = config.output_dir / METRICS
        self._was_over = start.step >= config.stop_step
        with disk_errors(self._path):
            if not self._was_over:
                _drop_after(self._path, start.global_step)
            self._file = self._path.open("a", encoding="utf-8")
            recorded = steps_of_phase(self._path, start)
            self._train_time = TrainTime(config.output_dir, start.phase, recorded, resumes=config.resume)
            self._board: EventFile | None = None
            if not self._was_over:
                self._board = EventFile(config.output_dir / "tensorboard", first_step=start.global_step + 1)

    def start_clock(self) -> None:
        """The first step begins now."""
        self._last = time.monotonic()
        if self._is_root and not self._was_over:
            self._train_time.start()

    def record(self, record: StepRecord, values: list[float]) -> None:
        """`values`: the workload's losses (nats, means of the global batch), and the gradient norm. In a trial they
        mean nothing. The first step that is not finite is kept in `not_finite`."""
        if self._config.trial:
            return
        *losses, norm = values
        state = record.state
        if self.not_finite is None and not all(map(math.isfinite, values)):
            said = ", ".join(f"{name} {loss}" for name, loss in zip(self._workload.losses, losses, strict=True))
            text = f"step {state.global_step}: {said}, gradient norm {norm} at learning rate {record.learning_rate:.3e}"
            self.not_finite = state.step - 1, text
        if self.not_finite is not None:
            return  # what comes after such a step is nothing
        now = time.monotonic()
        step_time, self._last = now - self._last, now
        self._recent.append((step_time, self._workload.work(record.counts)))
        if not self._is_root:
            return
        rates = self._rates()
        scalars = {
            "loss": sum(losses),
            **dict(zip(self._workload.losses, losses, strict=True)),
            "learning_rate": record.learning_rate,
            "grad_norm": norm,
            **rates,
            "step_time_s": step_time,
        }
        if record.compiled_graphs is not None:
            scalars["compiled_graphs"] = record.compiled_graphs
        self._write(state, scalars)

    def _rates(self) -> dict[str, float]:
        """Over the latest steps: samples a second, the model's FLOP/s, and its share of the hardware's peak, MFU
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), by our count and by the usual formula."""
        seconds = sum(time for time, _ in self._recent)
        samples, flops, usual_flops = (
            sum(getattr(work, name) for _, work in self._recent) / seconds
            for name in ("samples", "flops", "usual_flops")
        )
        rates = {"throughput": samples, "flops_per_s": flops}
        if self._peak_flops_per_s:
            rates |= {"mfu": flops / self._peak_flops_per_s, "mfu_usual": usual_flops / self._peak_flops_per_s}
        return rates

    def _write(self, state: TrainState, scalars: dict[str, float]) -> None:
        step = state.global_step
        line = {"step": step, "epoch": state.epoch, "samples": state.samples_consumed, **scalars, "time": time.time()}
        self._lines.append(_encode(line) + "\n")
        self._progress = {
            "label": f"phase {state.phase}, loss {scalars['loss']:.3f}",
            "done": state.step,
            "total": self._config.max_steps,
            "unit": "steps",
            "per_s": round(self._steps_per_s(), 6),
        }
        now = time.monotonic()
        if now - self._drawn >= _BOARD_INTERVAL_S or state.step == self._config.stop_step:
            self._drawn = now
            assert self._board is not None
            with disk_errors(self._path):
                self._board.add(step, scalars)
        if now - self._written >= _WRITE_INTERVAL_S:
            self.flush()
        if state.step % self._config.log_interval == 0 or state.step == self._config.stop_step:
            norm = f"grad-norm : {scalars['grad_norm']:.4f} " if self._config.print_grad_norm else ""
            mfu = f"mfu : {scalars['mfu']:.3f} " if "mfu" in scalars else ""
            left = (self._config.stop_step - state.step) / self._steps_per_s()
            self._say(
                f"LOG {time.asctime()} - ({state.epoch}, {step}) step_loss : {scalars['loss']:.4f} "
                f"learning_rate : {scalars['learning_rate']:.2e} throughput : {scalars['throughput']:.2f} {mfu}{norm}"
                f"[{state.step}/{self._config.max_steps}, {_duration(left)} left]"
            )

    def _steps_per_s(self) -> float:
        return len(self._recent) / sum(seconds for seconds, _ in self._recent)

    def flush(self, *, durable: bool = False) -> None:
        """Hand what is recorded to the operating system, so that it outlives this process; `durable`: and this
        machine's power."""
        self._written = time.monotonic()
        if self._lines:
            lines, self._lines = self._lines, []
            with disk_errors(self._path):
                self._file.write("".join(lines))
                self._file.flush()
                if self._board is not None:
                    self._board.flush()
                self._train_time.write()
                replace_json(self._config.output_dir / PROGRESS, self._progress)
        if durable and self._is_root:
            with disk_errors(self._path):
                os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close the files; what follows goes on with others."""
        if not self._is_root:
            return
        with disk_errors(self._path):
            self._train_time.write()
            self._file.close()
            if self._board is not None:
                self._board.close()

    def close(self, state: TrainState, *, workers: int) -> None:
        """Write the results of the phase so far: the tutorials' metrics file."""
        if not self._is_root:
            return
        failpoint("training-end:saved")
        self.flush(durable=True)
        failpoint("training-end:recorded")
        with disk_errors(self._path):
            self._file.close()
            if self._board is not None:
                self._board.close()
            self._train_time.write()
        failpoint("training-end:timed")
        (self._config.output_dir / PROGRESS).unlink(missing_ok=True)
        failpoint("training-end:without-progress")
        steps = steps_of_phase(self._path, state)
        summary = {
            "num_workers": workers,
            **phase_results(steps, state, train_time_s=self._train_time.seconds),
            "microsteps": state.step * self._config.grad_accum_usteps,
            "batch_size": self._config.micro_batch_size,
            **self._workload.summary(),
        }
        written = read_json(self._config.metrics_file) or {}
        if self._was_over and written.get("global_step", -1) >= state.global_step:
            summary = written  # they were complete before this run, and may be the next phase's by now
        else:
            write_json(self._config.metrics_file, summary)
        for line in self._workload.last_words(summary):
            self._say(line)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _drop_after(path: Path, step: int) -> None:
    """Cut the records of steps after `step`, and a half-written last line, off a metrics file."""
    kept = 0
    for record, size in recorded_steps(path):
        if record["step"] > step:
            break
        kept += size
    if path.exists():
        os.truncate(path, kept)
