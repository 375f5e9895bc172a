"""Puts deliberate faults into a copy of the project, one at a time, and checks that the test named for each one fails.

    python -m tests.mutants.run [WORD …] [--jobs N]      (or: make mutants ARGS='dropout --jobs 1')

`faults/*.toml` holds the faults, a file for each subject. The tools that mutate a program by themselves (mutmut,
cosmic-ray) swap operators and constants everywhere and take thousands of runs; these are mistakes that somebody could
make, each with the one test that has to notice it.

A fault is caught when its test passes on the unchanged project and fails with an assertion on the changed one. A crash
of any other kind is no catch: the fault has to be a program that works and is wrong.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import os
import py_compile
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
#: Seconds after which the tests of the unchanged project, or the test of one fault, are given up.
BASELINE_TIMEOUT_S, FAULT_TIMEOUT_S = 1800.0, 300.0
#: How the message of a failed assertion begins: of `assert`, of `pytest.raises` that saw nothing, of numpy and torch.
ASSERTION = re.compile(r"assert |AssertionError|Failed: DID NOT ")


class Outdated(Exception):
    """The list does not fit the project."""


@dataclass(frozen=True)
class Fault:
    """Replaces `old` by `new` in `file`, which makes `test` fail."""

    #: Name of the file in `faults/` that it is in.
    subject: str
    what: str
    file: str
    #: Occurs exactly once in the file, or in the function `within` (`Class.method`) of it.
    old: str
    new: str
    #: What pytest calls the test; without `[…]`: with all of its parameters.
    test: str
    within: str | None = None

    def applied(self, source: str) -> str:
        """The file with the fault in it. Raises `Outdated`."""
        start, end = (0, len(source)) if self.within is None else _extent(source, self.within)
        found = source.count(self.old, start, end)
        if found != 1:
            where = self.file if self.within is None else f"{self.within} in {self.file}"
            raise Outdated(f"“{self.what}”: {self.old!r} occurs {found} times in {where}; it must occur once")
        return source[:start] + source[start:end].replace(self.old, self.new) + source[end:]


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    seconds: float
    #: Why the fault was not caught; None: it was.
    problem: str | None


def _extent(source: str, name: str) -> tuple[int, int]:
    """Where a function or class begins and ends in its file; (0, 0) where there is none of this name."""
    nodes: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in nodes if getattr(node, "name", None) == part), None)
        nodes = getattr(found, "body", [])
    if found is None:
        return 0, 0
    lines = source.splitlines(keepends=True)
    return len("".join(lines[: found.lineno - 1])), len("".join(lines[: found.end_lineno]))


def read_faults(directory: Path = FAULTS) -> list[Fault]:
    """All faults, by subject."""
    return [
        Fault(subject=path.stem, **fields)
        for path in sorted(directory.glob("*.toml"))
        for fields in tomllib.loads(path.read_text())["fault"]
    ]


def copy_project(root: Path, copy: Path) -> None:
    """Copy the files of the checkout `root`, as they are now, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    # Compiled files that are valid for their source alone: a changed file may have size and time of the unchanged one.
    compileall.compile_dir(copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def run_tests(copy: Path, tests: Iterable[str], *words: str, timeout_s: float) -> tuple[int | None, list[_Case]]:
    """pytest's exit status (None: it was given up) and what it says of each test."""
    report, log = copy.with_suffix(".xml"), copy.with_suffix(".log")
    report.unlink(missing_ok=True)
    shared = os.environ.get("BERT_SHARED_DIR", str(ROOT.parent / "shared"))
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "BERT_SHARED_DIR": shared}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *words, *tests]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=copy, env={**os.environ, **environment}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    status: int | None = None
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, list(_cases(report)) if status is not None and report.exists() else []


@dataclass(frozen=True)
class _Case:
    """What pytest says of one test."""

    name: str
    #: `failure`, `error` (outside of the test itself), `skipped`; None: it passed.
    trouble: str | None
    message: str

    def is_of(self, test: str) -> bool:
        return self.name == test or self.name.startswith(f"{test}[")


def _cases(report: Path) -> Iterator[_Case]:
    for case in ElementTree.parse(report).iter("testcase"):
        trouble = next(iter(case), None)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        message = "" if trouble is None else trouble.get("message", "")
        yield _Case(name, None if trouble is None else trouble.tag, message)


def failing_before(copy: Path, tests: Sequence[str], *, jobs: int) -> list[str]:
    """The tests that do not pass on the unchanged project, each with what is wrong."""
    words = ["-n", str(jobs), "--dist", "loadscope"] if jobs > 1 else []
    status, cases = run_tests(copy, tests, *words, timeout_s=BASELINE_TIMEOUT_S)
    if not cases:
        said = copy.with_suffix(".log").read_text().strip().splitlines()[-5:]
        return [f"pytest ended with {status} before any test was run", *said]
    wrong = [f"{case.name}: {case.trouble}: {case.message}" for case in cases if case.trouble]
    return wrong + [f"{test}: not run" for test in tests if not any(case.is_of(test) for case in cases)]


def try_fault(fault: Fault, copy: Path) -> Outcome:
    """Put the fault into `copy`, run its test, and take it out again."""
    path, began = copy / fault.file, time.monotonic()
    source = path.read_text()
    path.write_text(fault.applied(source))
    try:
        status, cases = run_tests(copy, [fault.test], "-x", timeout_s=FAULT_TIMEOUT_S)
    finally:
        path.write_text(source)
    problem: str | None
    failed = next((case for case in cases if case.trouble in ("failure", "error")), None)
    if status is None:
        problem = f"given up after {FAULT_TIMEOUT_S:.0f} s"
    elif status == 0:
        problem = "SURVIVED"
    elif status != 1 or failed is None or failed.trouble != "failure" or not ASSERTION.match(failed.message):
        said = failed.message.splitlines()[0][:100] if failed and failed.message else f"pytest ended with {status}"
        problem = f"no assertion failed: {said}"
    else:
        problem = None
    return Outcome(fault, time.monotonic() - began, problem)


def run(root: Path, faults: Sequence[Fault], *, jobs: int) -> int:
    """Try all faults and print a table; returns how many were not caught. Raises `Outdated`."""
    for fault in faults:
        fault.applied((root / fault.file).read_text())
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copy = Path(scratch) / f"copy{number}"
            copy_project(root, copy)
            copies.put(copy)
        tests = sorted({fault.test for fault in faults})
        print(f"{len(tests)} tests on the unchanged project", flush=True)
        if wrong := failing_before(copy, tests, jobs=jobs):
            raise Outdated("these tests do not pass without any fault:\n  " + "\n  ".join(wrong))

        def tried(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                return try_fault(fault, copy)
            finally:
                copies.put(copy)

        outcomes = []
        with ThreadPoolExecutor(jobs) as threads:
            for future in as_completed([threads.submit(tried, fault) for fault in faults]):
                outcomes.append(future.result())
                _print_row(outcomes[-1])
    return sum(outcome.problem is not None for outcome in outcomes)


def _print_row(outcome: Outcome) -> None:
    fault, test = outcome.fault, outcome.fault.test.partition("::")[2]
    verdict = outcome.problem or "caught"
    print(f"{fault.what:70} {fault.file:32} {test:60} {outcome.seconds:5.1f} s  {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="faults with all of these words in their entry")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at the same time (default: %(default)s)")
    args = parser.parse_args()
    faults = [fault for fault in read_faults() if all(word in str(fault) for word in args.words)]
    if not faults:
        sys.exit("no fault has these words in its entry; see tests/mutants/faults")
    began = time.monotonic()
    try:
        missed = run(ROOT, faults, jobs=max(1, min(args.jobs, len(faults))))
    except (Outdated, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    minutes = (time.monotonic() - began) / 60
    print(f"{len(faults)} faults in {minutes:.1f} minutes: {len(faults) - missed} caught, {missed} not caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
