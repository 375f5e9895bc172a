"""Records each step of a run: on the console, in TensorBoard and metrics.jsonl, and in the summary at its end."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.console import clock
from common.errors import NonFiniteStep
from common.files import METRICS, PROGRESS, disk_errors, failpoint, replace_json
from trainer.data.loader import Step, record_samples
from trainer.metrics.plateau import Diagnosis, Doctor
from trainer.metrics.results import TrainTime, append_missing, recorded_steps, steps_of_phase, write_results
from trainer.metrics.trackers.base import Tracker
from trainer.registry import TENSORBOARD, TRACKERS, load
from trainer.run import Run
from trainer.state import TrainState
from trainer.workloads.base import MASKED_LM_LOSS, StepCost

#: Steps that the throughput is averaged over, as in the tutorials' script.
THROUGHPUT_WINDOW = 10
#: Minimum seconds between writes of the files that are read during a run.
_WRITE_INTERVAL_S = 1.0
#: Minimum seconds between points in TensorBoard, which draws a thousand at most; metrics.jsonl has every step.
_BOARD_INTERVAL_S = 0.05

#: Parts of a step's time, in seconds: waiting for its batch, and for a checkpoint before it to be copied.
DATA_WAIT, CHECKPOINT_STALL = "data_wait_s", "checkpoint_stall_s"

#: Most lines that a worker other than the root keeps: more than a second of the shortest steps.
_KEPT = 4096

#: json.dumps would create an encoder for every line.
_encode = json.JSONEncoder(allow_nan=False).encode


@dataclass(frozen=True)
class StepRecord:
    """A finished step, before its losses are read from the device."""

    state: TrainState
    learning_rate: float
    #: The reader's counts, summed over the global batch.
    counts: Sequence[int]
    #: Of all workers.
    micro_batches: int
    #: Graphs compiled so far, on devices that compile.
    compiled_graphs: int | None = None


class Metrics:
    """The records of a run, which the root worker writes; the others only check that their losses are finite."""

    def __init__(self, run: Run, start: TrainState, doctor: Doctor | None = None) -> None:
        """Appends to the records in the output directory and drops those of steps after `start`, which are repeated.
        If no steps are left to train, later records belong to the next phase and stay. `doctor`: what comments on the
        masked-LM loss. Raises `DiskError`."""
        self._run, self._config, self._workload, self._log = run, run.config, run.workload, run.log
        self._is_root, self._doctor = run.is_root, doctor
        self._device, self._mesh = run.device, run.mesh
        peak = run.mesh.broadcast_object(run.device.peak_flops_per_s(start.precision) if self._is_root else None)
        #: Of all workers' devices together; None where it is not known.
        self._peak_flops_per_s = peak and peak * run.mesh.world_size
        #: When the last step ended; None before the first one.
        self._last: float | None = None
        self._written = self._drawn = 0.0
        #: The first step of the phase, from 0, that was not finite, and the message about it.
        self._not_finite: tuple[int, str] | None = None
        #: Seconds that the loop has waited since the last record, by name of the record's field.
        self._waited: dict[str, float] = {}
        #: (global step, line) of steps recorded but not yet written. Only the root writes them; the other workers keep
        #: more than it can have left unwritten, in case it is lost.
        self._lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=None if self._is_root else _KEPT)
        self._progress: dict[str, Any] = {}
        #: (seconds, cost) of the latest steps.
        self._recent: collections.deque[tuple[float, StepCost]] = collections.deque(maxlen=THROUGHPUT_WINDOW)
        config = run.config
        self._path = config.output_dir / METRICS
        if not self._is_root:
            return
        self._was_over = start.step >= config.stop_step
        with disk_errors(self._path):
            if not self._was_over:
                _drop_after(self._path, start.global_step)
            self._file = self._path.open("a", encoding="utf-8")
            recorded = steps_of_phase(self._path, start)
            self._train_time = TrainTime(config.output_dir, start.phase, recorded, resumes=config.resume)
            self._board: Tracker | None = None
            if not self._was_over and TENSORBOARD in run.trackers:
                self._board = load(TRACKERS[TENSORBOARD])(config.output_dir / "tensorboard", start.global_step + 1)

    def begin_step(self, step: Step) -> None:
        """`step` begins; the clock starts with the first one. Raises `DiskError`."""
        if self._last is None:
            self._last = time.monotonic()
            self._waited.clear()  # part of the start
            if self._is_root:
                self._train_time.start()
        if self._config.record_samples and not self._config.trial:
            record_samples(step, self._config.output_dir / f"samples-{self._mesh.rank}.jsonl")

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The block's time is recorded with the next step, in the field `name`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited[name] = self._waited.get(name, 0.0) + time.monotonic() - began

    def record(self, record: StepRecord, values: list[float]) -> None:
        """`values`: the workload's losses (nats, means over the global batch, times their factors), then the gradient
        norm; meaningless in a trial. The first step that is not finite is kept for `require_finite`."""
        if self._config.trial:
            return
        *weighted, norm = values
        factors = self._workload.losses
        losses = {name: loss / factor for (name, factor), loss in zip(factors.items(), weighted, strict=True)}
        state = record.state
        if self._not_finite is None and not all(map(math.isfinite, values)):
            said = ", ".join(f"{name} {loss}" for name, loss in losses.items())
            text = f"step {state.global_step}: {said}, gradient norm {norm} at learning rate {record.learning_rate:.3e}"
            self._not_finite = state.step - 1, text
        if self._not_finite is not None:
            return  # later values are meaningless
        now = time.monotonic()
        assert self._last is not None
        step_time, self._last = now - self._last, now
        self._recent.append((step_time, self._workload.work(record.counts, record.micro_batches)))
        rates = self._rates()
        scalars = {
            "loss": sum(weighted),
            **losses,
            "learning_rate": record.learning_rate,
            "grad_norm": norm,
            **rates,
            "step_time_s": step_time,
            **{name: self._waited.pop(name, 0.0) for name in (DATA_WAIT, CHECKPOINT_STALL)},
        }
        if record.compiled_graphs is not None:
            scalars["compiled_graphs"] = record.compiled_graphs
        diagnoses = self._diagnoses(state, scalars)
        at = time.time()
        self._lines.append((state.global_step, self._line(state, scalars, diagnoses, at)))
        if self._is_root:
            self._write(state, scalars, at)

    def record_alone(self, state: TrainState) -> None:
        """Record the steps up to `state` that the root, which may be lost, has not recorded. Raises `DiskError`."""
        append_missing(self._path, {step: line for step, line in self._lines if step <= state.global_step})

    @property
    def saw_non_finite(self) -> bool:
        """Whether this worker has recorded a step that was not finite; a device may still be computing later ones."""
        return self._not_finite is not None

    def require_finite(self) -> None:
        """Raise `NonFiniteStep`, on all workers, for the first step that was not finite on any."""
        self._device.finish_closures()
        found = [one for one in self._mesh.all_gather_object(self._not_finite) if one is not None]
        if found:
            step, text = min(found)
            raise NonFiniteStep(text, step=step)

    def _diagnoses(self, state: TrainState, scalars: dict[str, float]) -> list[Diagnosis]:
        """What the doctor says after this step; it is logged."""
        if self._doctor is None:
            return []
        found = self._doctor.record(state.step, scalars[MASKED_LM_LOSS], scalars["learning_rate"])
        for diagnosis in found:
            self._log(str(diagnosis))
        return found

    def _rates(self) -> dict[str, float]:
        """Over the latest steps: samples and the model's FLOP per second, and its share of the hardware's peak (MFU,
        Chowdhery et al. 2022, arXiv:2204.02311, appendix B), by our count and by the usual formula."""
        seconds = sum(time for time, _ in self._recent)
        samples, flops, usual_flops = (
            sum(getattr(work, name) for _, work in self._recent) / seconds
            for name in ("samples", "flops", "usual_flops")
        )
        rates = {"throughput": samples, "flops_per_s": flops}
        # A CPU's peak is measured when training begins, perhaps beside other programs.
        if self._peak_flops_per_s and flops <= self._peak_flops_per_s:
            rates |= {"mfu": flops / self._peak_flops_per_s, "mfu_usual": usual_flops / self._peak_flops_per_s}
        return rates

    def _line(self, state: TrainState, scalars: dict[str, float], diagnoses: list[Diagnosis], at: float) -> str:
        place = {"step": state.global_step, "epoch": state.epoch, "samples": state.samples_consumed}
        line: dict[str, Any] = {**place, **scalars, "time": at}
        if diagnoses:
            line["diagnoses"] = [vars(one) for one in diagnoses]
        return _encode(line) + "\n"

    def _write(self, state: TrainState, scalars: dict[str, float], at: float) -> None:
        step = state.global_step
        condition = f", {self._doctor.condition}" if self._doctor is not None and self._doctor.condition else ""
        self._progress = {
            "label": f"phase {state.phase}, loss {scalars['loss']:.3f}{condition}",
            "done": state.step,
            "total": self._config.max_steps,
            "unit": "steps",
            "per_s": round(self._steps_per_s(), 6),
        }
        now = time.monotonic()
        is_due = now - self._drawn >= _BOARD_INTERVAL_S or state.step == self._config.stop_step
        if self._board is not None and is_due:
            self._drawn = now
            with disk_errors(self._path):
                self._board.add(step, scalars, at)
        if now - self._written >= _WRITE_INTERVAL_S:
            self.flush()
        if state.step % self._config.log_interval == 0 or state.step == self._config.stop_step:
            norm = f"grad-norm : {scalars['grad_norm']:.4f} " if self._config.print_grad_norm else ""
            mfu = f"mfu : {scalars['mfu']:.3f} " if "mfu" in scalars else ""
            left = (self._config.stop_step - state.step) / self._steps_per_s()
            self._log(
                f"LOG {time.asctime()} - ({state.epoch}, {step}) step_loss : {scalars['loss']:.4f} "
                f"learning_rate : {scalars['learning_rate']:.2e} throughput : {scalars['throughput']:.2f} {mfu}{norm}"
                f"[{state.step}/{self._config.max_steps}, {clock(left)} left]"
            )

    def _steps_per_s(self) -> float:
        return len(self._recent) / sum(seconds for seconds, _ in self._recent)

    def flush(self, *, durable: bool = False) -> None:
        """Write what is recorded to the files, so that it survives a crash of this process; if `durable`, of the
        machine. Raises `DiskError`."""
        self._written = time.monotonic()
        if self._lines and self._is_root:
            text = "".join(line for _, line in self._lines)
            self._lines.clear()
            with disk_errors(self._path):
                self._file.write(text)
                self._file.flush()
                if self._board is not None:
                    self._board.flush()
                self._train_time.write()
                replace_json(self._config.output_dir / PROGRESS, self._progress)
        if durable and self._is_root:
            with disk_errors(self._path):
                os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close the files, so that another trainer can continue. Raises `DiskError`."""
        if not self._is_root:
            return
        with disk_errors(self._path):
            self._train_time.write()
            self._file.close()
            if self._board is not None:
                self._board.close()

    def close(self, state: TrainState) -> None:
        """Write the summary of the phase up to `state`: the tutorials' metrics file. Raises `DiskError`."""
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
        progress = self._config.output_dir / PROGRESS
        with disk_errors(progress):
            progress.unlink(missing_ok=True)
        failpoint("training-end:without-progress")
        write_results(self._run, state, train_time_s=self._train_time.seconds, was_over=self._was_over)


def _drop_after(path: Path, step: int) -> None:
    """Cut the records of steps after `step`, and a half-written last line, off a metrics file."""
    kept = 0
    for record, size in recorded_steps(path):
        if record["step"] > step:
            break
        kept += size
    if path.exists():
        os.truncate(path, kept)
