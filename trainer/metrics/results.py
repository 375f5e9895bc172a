"""The results of a phase, computed from metrics.jsonl, whichever processes trained its steps, and results.json."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import DiskError
from common.files import METRICS, disk_errors, read_json, replace_json, write_json
from trainer.state import TrainState

if TYPE_CHECKING:
    from trainer.run import Run

#: File with the training time of each phase, in seconds, by phase number.
TRAIN_TIME = "train_time.json"
#: Keys that every record of a step has.
_KEYS = {"step", "epoch", "loss", "throughput", "step_time_s"}
#: Iterations at the start of an epoch that its rate leaves out, as in the tutorial.
_WARMUP_ITERATIONS = 2


class TrainTime:
    """Training time of a phase over all attempts, including steps that were repeated."""

    def __init__(self, directory: Path, phase: int, recorded: list[dict[str, Any]], *, resumes: bool) -> None:
        """Continues from the time that earlier attempts recorded if the run `resumes`; if they left none, from the sum
        over the steps `recorded` in metrics.jsonl."""
        self._path, self._phase = directory / TRAIN_TIME, str(phase)
        self._all = read_json(self._path) or {}
        before = self._all.get(self._phase) if resumes else 0.0
        if not isinstance(before, int | float):
            before = sum(record["step_time_s"] for record in recorded)
        self._before = before
        self._began: float | None = None

    def start(self) -> None:
        """Start the clock."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return float(self._before + (0 if self._began is None else time.monotonic() - self._began))

    def write(self) -> None:
        """Write the time for the next attempt. Raises `OSError`."""
        replace_json(self._path, {**self._all, self._phase: round(self.seconds, 3)})


def recorded_steps(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, length in bytes) of each line of a metrics file from byte `start` on, up to the first incomplete one."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(record, dict) or not record.keys() >= _KEYS:
                return
            yield record, len(line)


def append_missing(path: Path, lines: dict[int, str]) -> None:
    """Append, durably, those of `lines` (by global step) that come after the last record of a metrics file. Several
    processes may do so at once. Raises `DiskError`, also if steps between the record and the lines are missing."""
    with disk_errors(path), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        last = kept = 0
        for record, size in recorded_steps(path):
            last, kept = record["step"], kept + size
        missing = [step for step in sorted(lines) if step > last]
        if missing and last and missing[0] != last + 1:
            raise DiskError(f"{path} ends with step {last}, and this worker only knows steps from {missing[0]} on")
        file.truncate(kept)
        file.seek(kept)
        file.write("".join(lines[step] for step in missing).encode())
        file.flush()
        os.fsync(file.fileno())


def steps_of_phase(path: Path, state: TrainState) -> list[dict[str, Any]]:
    """The records of the steps done in `state`'s phase; the file may also hold the other phase's."""
    before = state.global_step - state.step
    return [record for record, _ in recorded_steps(path) if before < record["step"] <= state.global_step]


def phase_results(steps: list[dict[str, Any]], state: TrainState, *, train_time_s: float) -> dict[str, Any]:
    """The summary of a phase from the records of its `steps`; None where too few are recorded.

    throughput_average is the mean of the recorded throughputs, each over the latest ten steps of its process, as in the
    tutorials' script; iterations_per_s is that of the last epoch.
    """
    throughputs = [step["throughput"] for step in steps]
    diagnoses = [{"step": step["step"], **one} for step in steps for one in step.get("diagnoses", ())]
    return {
        "epoch": state.epoch,
        "steps": state.step,
        "global_step": state.global_step,
        "loss": steps[-1]["loss"] if steps else None,
        "first_loss": steps[0]["loss"] if steps and steps[0]["step"] == state.global_step - state.step + 1 else None,
        "mean_loss_last_50": _mean([step["loss"] for step in steps[-50:]]),
        "train_time_minutes": train_time_s / 60,
        "throughput_average": _mean(throughputs),
        "throughput_peak": max(throughputs, default=None),
        "iterations_per_s": _rate_of_last_epoch(steps),
        "precision": state.precision,
        **({"diagnoses": diagnoses} if diagnoses else {}),
        **({"changes": state.changes} if state.changes else {}),
        **({"skipped_batches": state.skipped} if state.skipped else {}),
    }


def write_results(run: Run, state: TrainState, *, train_time_s: float, was_over: bool) -> None:
    """Write the summary of the phase up to `state`, the tutorials' metrics file, and log it. `was_over`: no step was
    left to train, so a summary that is there stays: it may be the next phase's by now. Raises `DiskError`."""
    config = run.config
    steps = steps_of_phase(config.output_dir / METRICS, state)
    summary = {
        "device": config.device,  # as asked for
        "num_workers": run.mesh.world_size,
        **phase_results(steps, state, train_time_s=train_time_s),
        "microsteps": state.samples_consumed // (config.micro_batch_size * run.mesh.data_parallel_size),
        "batch_size": config.micro_batch_size,
        **run.workload.summary(),
    }
    file = config.metrics_file or config.output_dir / "results.json"
    written = read_json(file) or {}
    if was_over and written.get("global_step", -1) >= state.global_step:
        summary = written
    else:
        write_json(file, summary)
    for line in run.workload.last_lines(summary) or [in_words(summary)]:
        run.log(line)


def in_words(counts: Mapping[str, Any]) -> str:
    """The results of a phase in a few words, from its summary."""
    warnings = ", ".join(f"{one['cause']} (step {one['step']})" for one in counts.get("diagnoses", ()))
    return (
        f"{counts['steps']} steps, loss {recorded(counts, 'first_loss')} → {recorded(counts, 'loss')} "
        f"(mean of the last 50: {recorded(counts, 'mean_loss_last_50')}), "
        f"{recorded(counts, 'throughput_average', '.0f')} sequences/s{warnings and f'; warnings: {warnings}'}"
    )


def recorded(counts: Mapping[str, Any], name: str, form: str = ".3f") -> str:
    """Format a count; it is null if metrics.jsonl was lost."""
    value = counts.get(name)
    return "not recorded" if value is None else format(value, form)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate_of_last_epoch(steps: list[dict[str, Any]]) -> float | None:
    """Optimizer steps per second in the last epoch, without its first two, as the tutorial counts them."""
    times = [step["step_time_s"] for step in steps if step["epoch"] == steps[-1]["epoch"]][_WARMUP_ITERATIONS:]
    return len(times) / sum(times) if times else None
