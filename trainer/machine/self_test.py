"""`python -m trainer --self-test`: whether this machine's device computes what training needs, compared with the CPU.

Options of the command line name the device, the model and its micro-batch; the data are random. Several workers
(`--spawn`, torchrun) check the collectives, too. The findings are written to OUTPUT_DIR/self-test.json.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.errors import Interrupted, UserError
from common.files import disk_errors, write_json
from trainer.config import TrainConfig
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.select import select
from trainer.machine import arithmetic, collectives, randomness, training
from trainer.machine.kind import FILE, versions
from trainer.machine.sample import SHORTEST, sample_rows, write_sample
from trainer.machine.subject import Finding, Subject
from trainer.options import CommandLine, to_config
from trainer.parallel.mesh import Mesh
from trainer.workloads.bert import BertOptions, model_of

#: Micro-steps in the step whose gradients are checked.
_USTEPS = 2
_DEFAULT_SEQ_LEN = 128

#: In the order in which they run: the cause of a failure comes before its consequences.
CHECKS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "integers": arithmetic.check_integers,
    "copies": arithmetic.check_copies,
    "operations": arithmetic.check_operations,
    "attention mask": arithmetic.check_attention_mask,
    "dropout rate": randomness.check_dropout_rate,
    "dropout independence": randomness.check_dropout_independence,
    "compiled graphs": arithmetic.check_compiled_graphs,
    "collectives": collectives.check_collectives,
    "gradients": training.check_gradients,
    "updates": training.check_updates,
    "resume": training.check_resume,
    "fallbacks": arithmetic.check_fallbacks,
    "throughput": arithmetic.check_throughput,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found, in all workers."""

    findings: list[Finding]
    seconds: float

    @property
    def worst(self) -> Finding:
        return max(self.findings, key=lambda finding: finding.severity)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)


def self_test(given: CommandLine, mesh: Mesh) -> int:
    """Run all checks with the options `given`; returns the exit status. Raises `UserError`, `DiskError`, and
    `Interrupted` after a signal."""
    if not isinstance(given.workload, BertOptions):
        raise UserError(f"--self-test trains BERT, not {given.run.workload}; leave --workload out")
    seq_len = given.workload.seq_len or _DEFAULT_SEQ_LEN
    if seq_len < SHORTEST:
        raise UserError(f"--seq_len is {seq_len}; allowed with --self-test: {SHORTEST} or more")
    output_dir = given.config.output_dir.expanduser()
    with disk_errors(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    given = _alone(given)
    device = select(given.config.device, mesh, _device_options(given.config))
    mesh = mesh.connect(device.backend, given.config.collective_timeout_s, init_method=device.init_method)
    device.start(mesh)
    folder = Path(mesh.by_root(lambda: tempfile.mkdtemp(prefix="self-test-", dir=output_dir)))
    try:
        subject = _subject(given, device, mesh, folder)
        log: Callable[[str], None] = (lambda line: print(line, flush=True)) if mesh.is_root else (lambda line: None)
        log(f"self-test of {device.describe()}; {mesh.world_size} worker(s); precision {subject.config.precision}")
        outcomes = run_checks(subject, log)
        failed = [name for name, outcome in outcomes.items() if not outcome.passed]
        if mesh.is_root:
            write_json(output_dir / FILE, _record(subject, outcomes))
            shutil.rmtree(folder, ignore_errors=True)
        log(_verdict(outcomes, output_dir / FILE))
        mesh.barrier()  # the first worker that ends with 1 makes the launcher stop the root
        mesh.disconnect()
    finally:
        if mesh.is_root:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def run_checks(subject: Subject, log: Callable[[str], None]) -> dict[str, Outcome]:
    """Run every check, in all workers; `log` gets a row of the table for each."""
    outcomes = {}
    log(f"{'check':<21} {'':6} {'measured':>9} {'allowed':>9}  worst of")
    for name, check in CHECKS.items():
        began = time.monotonic()
        mine: list[Finding] = []
        try:
            mine.extend(check(subject))  # keeps what is found before an error
        except Interrupted:
            raise
        except Exception as error:
            traceback.print_exc()
            mine.append(Finding(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", math.inf))
        everyones = subject.mesh.all_gather_object(mine)
        findings = [finding for worker in everyones for finding in worker]
        outcomes[name] = Outcome(findings, round(time.monotonic() - began, 3))
        log(_row(name, outcomes[name]))
    return outcomes


def _alone(given: CommandLine) -> CommandLine:
    """The same training without data, schedule and checkpoints of its own."""
    config = given.config
    return CommandLine(
        dataclasses.replace(given.run, phase2=False, shards_per_ckpt=0),
        dataclasses.replace(
            given.workload, seq_len=given.workload.seq_len or _DEFAULT_SEQ_LEN, word_embeddings=None,
            masked_lm_prob=None, final_masked_lm_prob=None, whole_word_mask=False,
        ),
        dataclasses.replace(
            config, grad_accum_usteps=_USTEPS, batches_per_execution=1, batch_ramp_steps=0, max_steps=1, stop_step=1,
            warmup_steps=0, schedule="linear", resume=False, resume_step=-1, resume_ckpt_path=None, new_data=False,
            allow_changes=(), ckpt_interval_steps=0, ckpt_interval_minutes=0.0, minimal_ckpt=False, num_ckpts_to_keep=1,
            trial=True, compile=False, data_parallel="allreduce", grad_reduce_in_bf16=False, graphs=None,
            spot_watch=False, record_samples=False, metrics_file=None, precision=config.wanted_precision,
            # The tutorials' names for AdamW imply a precision, which is given here.
            optimizer="AdamW" if config.optimizer.startswith("AdamW") else config.optimizer,
        ),
        given.trackers,
    )  # fmt: skip


def _device_options(config: TrainConfig, *, compiles: bool = False) -> DeviceOptions:
    """Operations on the CPU end no check: `check_fallbacks` judges them."""
    return DeviceOptions(
        precision=config.precision, compile_cache=config.compile_cache, compile=compiles, allow_fallbacks=None,
        shard_optimizer=config.shard_optimizer,
    )  # fmt: skip


def _subject(given: CommandLine, device: Device, mesh: Mesh, folder: Path) -> Subject:
    """Collective: the root writes the sample. Raises `UserError`."""
    options, data = given.workload, folder / "data"
    rows = given.config.global_batch_size(mesh.data_parallel_size)
    model = model_of(options)

    def write() -> None:
        write_sample(
            data,
            sample_rows(
                rows, vocab_size=model.vocab_size, seq_len=options.seq_len, max_pred_len=options.max_pred_len, seed=0
            ),
        )

    mesh.by_root(write)
    precision = given.config.precision
    if precision == "auto":
        precision = mesh.by_root(device.automatic_precision)[0]
    given = dataclasses.replace(
        given,
        workload=dataclasses.replace(options, data_dir=data),
        config=dataclasses.replace(given.config, output_dir=folder / "out", precision=precision),
    )
    config, _ = to_config(given, mesh)
    if device.compiles_steps:
        return Subject(config, model, data, mesh, {"compiled": device})
    devices, reason = {"eager": device}, ""
    try:
        devices["compiled"] = select(config.device, mesh, _device_options(config, compiles=True))
        devices["compiled"].start(mesh)
    except UserError as error:
        reason = str(error)
    return Subject(config, model, data, mesh, devices, reason)


def _row(name: str, outcome: Outcome) -> str:
    worst = outcome.worst
    mark = "FAILED" if not outcome.passed else "-" if worst.measured is None else "ok"
    measured, limit = ("", "") if worst.measured is None else (f"{worst.measured:.2g}", f"{worst.limit:.2g}")
    count = len(outcome.findings)
    more = f" (of {count}, {outcome.seconds:.1f} s)" if count > 1 else ""
    return f"{name:<21} {mark:6} {measured:>9} {limit:>9}  {worst.what}{more}"


def _verdict(outcomes: dict[str, Outcome], path: Path) -> str:
    failed = [name for name, outcome in outcomes.items() if not outcome.passed]
    if failed:
        return f"self-test FAILED: {', '.join(failed)}; do not train on this device; all findings are in {path}"
    missing = [name for name, outcome in outcomes.items() if outcome.worst.measured is None]
    without = f", not measured: {', '.join(missing)}" if missing else ""
    return f"self-test passed: {len(outcomes) - len(missing)} checks{without}; all findings are in {path}"


def _record(subject: Subject, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    return {
        "passed": all(outcome.passed for outcome in outcomes.values()),
        "device": subject.device.describe(),
        "workers": subject.mesh.world_size,
        "tensor_parallel_size": subject.mesh.tensor_parallel_size,
        "precision": subject.config.precision,
        "optimizer": subject.config.optimizer,
        "model": subject.model.to_dict(),
        "not_compiled": subject.not_compiled,
        "versions": versions(),
        "time": time.time(),
        "checks": {name: _check_record(outcome) for name, outcome in outcomes.items()},
    }


def _check_record(outcome: Outcome) -> dict[str, Any]:
    findings = [
        # JSON has no infinity and no NaN.
        {**vars(one), "measured": one.measured if math.isfinite(one.measured or 0.0) else str(one.measured)}
        for one in outcome.findings
    ]
    return {"passed": outcome.passed, "seconds": outcome.seconds, "findings": findings}
