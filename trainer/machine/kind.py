"""Kinds of machines, and the self-test that each kind passes once before it compiles. Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from common.errors import EXIT_INTERRUPTED, UserError
from common.files import disk_errors, read_json, write_json
from common.hashing import digest
from common.process import PARENT_VARIABLE

#: The self-test's record, and the folder in which one is kept for each kind of machine.
FILE, SELF_TESTS = "self-test.json", "self-tests"


def versions() -> dict[str, str]:
    """Versions of the packages that trace and compile graphs."""
    found = {}
    for package in ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "nki"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def test_once(records: Path, device: str, command: Sequence[str], *, nodes: int) -> None:
    """Run the training `command` with `--self-test`, unless a machine of this kind has passed it or no BERT is trained.

    Its record is kept in `records`. Raises `UserError` if the self-test fails.
    """
    if "--workload=mnist" in command or ("--workload", "mnist") in itertools.pairwise(command):
        return
    if nodes > 1:
        say(f"self-test: not run across several machines; run on each: python -m trainer --self-test --device {device}")
        return
    from trainer.devices.neuron_lane import Installation

    kind = {"device": device, "instance": Installation.of_machine().instance, **versions()}
    record = (
        records / f"{device}-{digest(f'{name}={value}' for name, value in kind.items()).rpartition(':')[2][:10]}.json"
    )
    if (read_json(record) or {}).get("passed"):
        say(f"self-test: passed before on this kind of machine, {record}")
        return
    with disk_errors(records):
        records.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=records)
    with folder as name:
        words = [sys.executable, *command, "--self-test", f"--output_dir={name}"]
        status = subprocess.run(words, env={**os.environ, PARENT_VARIABLE: str(os.getpid())}, check=False).returncode
        if status == EXIT_INTERRUPTED:
            sys.exit(EXIT_INTERRUPTED)
        found = read_json(Path(name) / FILE)
        if found is not None:
            write_json(record, {"kind": kind, **found})
    if status:
        raise UserError(
            f"this machine failed its self-test (exit status {status}): its table is above, {record}; see "
            f"docs/trainium.md. [cluster] self_test = false, or --no-self-test, trains nevertheless"
        )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
