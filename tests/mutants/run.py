"""Puts deliberate faults into a copy of the project, one at a time, and checks that the test named for each one fails.

    python -m tests.mutants.run [WORD …] [--jobs N]      (or: make mutants ARGS='dropout --jobs 1')

`faults/*.toml` holds the faults, one file per subject. Tools that mutate a program automatically (mutmut, cosmic-ray)
swap operators and constants everywhere and take thousands of runs; these are mistakes that somebody could make, each
with the one test that has to notice it.

A fault is caught when its test passes on the unchanged project and fails on the changed one: with an assertion, or
because the program refuses what it should accept. A crash does not count: the faulty program has to work and be wrong.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from tests.interpreter import interpret_kernels

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
#: Seconds after which the tests of a file without a fault, or the test of one fault, are given up.
BASELINE_TIMEOUT_S, TIMEOUT_S = 1800.0, 300.0
#: What most tests import, and what takes seconds: imported once, before a process is forked for each fault.
PRELOADED = ("torch", "h5py", "luigi", "requests", "torch.utils.flop_counter", "transformers.models.bert.modeling_bert")
#: How the message of a failed assertion begins (`assert`, a `pytest.raises` that saw nothing, numpy, torch), or that of
#: an error of the program's own which the test does not expect. Workers that are too slow prove nothing.
ASSERTION = re.compile(r"assert |AssertionError(?!: still running)|Failed: DID NOT |common\.errors\.\w+: ")


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
    # Compiled files are checked by the source's hash: a changed file may have the size and time of the unchanged one.
    compileall.compile_dir(copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


@dataclass(frozen=True)
class Case:
    """What pytest says of one test."""

    name: str
    #: `failure`, `error` (outside of the test itself), `skipped`; None: it passed.
    trouble: str | None
    message: str

    def is_of(self, test: str) -> bool:
        return self.name == test or self.name.startswith(f"{test}[")


@dataclass
class Run:
    """pytest in a process of its own, in a copy of the project, perhaps with a fault."""

    tests: list[str]
    fault: Fault | None = None
    #: pytest's exit status; None: it was given up.
    status: int | None = None
    seconds: float = 0.0
    cases: list[Case] = field(default_factory=list)
    #: The end of what it printed.
    said: str = ""

    def start(self, copy: Path) -> None:
        self._copy, self._began = copy, time.monotonic()
        if self.fault is not None:
            path = copy / self.fault.file
            self._source = path.read_text()
            path.write_text(self.fault.applied(self._source))
        self._report, self._log = copy.with_suffix(".xml"), copy.with_suffix(".log")
        self._report.unlink(missing_ok=True)
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            status = 70
            try:
                status = _pytest(copy, self._log, [f"--junit-xml={self._report}", *self.tests])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)

    def kill(self) -> None:
        """Kill it, and whatever its tests have left running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def is_over(self) -> bool:
        """Whether it has ended, or been given up; the copy is then as it was before."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        self.seconds = time.monotonic() - self._began
        if not pid and self.seconds < (TIMEOUT_S if self.fault else BASELINE_TIMEOUT_S):
            return False
        self.kill()
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        else:
            os.waitpid(self._pid, 0)
        if self._report.exists() and self.status is not None:
            self.cases = list(_cases(self._report))
        self.said = "\n  ".join(self._log.read_text(errors="replace").strip().splitlines()[-5:])
        if self.fault is not None:
            (self._copy / self.fault.file).write_text(self._source)
        return True


def _pytest(copy: Path, log: Path, words: list[str]) -> int:
    """Run pytest in this process, which was forked for it; returns its exit status."""
    os.setsid()
    os.chdir(copy)
    with log.open("w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    # Import the copy's modules, here and in all processes that are started.
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, copy))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["XDG_CACHE_HOME"] = str(copy.with_suffix(".cache"))  # of compiled kernels, faulty ones too
    sys.dont_write_bytecode = True
    # Pytest cannot rewrite plugins that the preloaded modules have imported.
    ignore = "ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", ignore, *words]))


def _cases(report: Path) -> Iterator[Case]:
    for case in ElementTree.parse(report).iter("testcase"):
        trouble = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        message = "" if trouble is None else trouble.get("message", "")
        yield Case(name, None if trouble is None else trouble.tag, message)


def in_parallel(runs: Iterable[Run], copies: Iterable[Path]) -> Iterator[Run]:
    """The runs as they end, one at a time in each copy."""
    waiting, free, under_way = deque(runs), deque(copies), list[tuple[Run, Path]]()
    try:
        while waiting or under_way:
            while waiting and free:
                under_way.append((waiting.popleft(), free.popleft()))
                under_way[-1][0].start(under_way[-1][1])
            for run, copy in [pair for pair in under_way if pair[0].is_over()]:
                under_way.remove((run, copy))
                free.append(copy)
                yield run
            time.sleep(0.05)
    finally:
        for run, _ in under_way:
            run.kill()


def failing_before(tests: Iterable[str], copies: Sequence[Path]) -> list[str]:
    """The tests that do not pass on the unchanged project, each with what is wrong."""
    by_file = [list(found) for _, found in groupby(sorted(tests), lambda test: test.partition("::")[0])]
    wrong = []
    for run in in_parallel(map(Run, by_file), copies):
        wrong += [f"{case.name}: {case.trouble}: {case.message}" for case in run.cases if case.trouble]
        missing = [test for test in run.tests if not any(case.is_of(test) for case in run.cases)]
        if missing and not wrong:
            wrong.append(f"{missing[0]}: not run; pytest ended with {run.status}:\n  {run.said}")
    return wrong


def problem_of(run: Run) -> str | None:
    """Why a run's fault is not caught; None: it is."""
    failed = next((case for case in run.cases if case.trouble in ("failure", "error")), None)
    if run.status is None:
        return f"given up after {TIMEOUT_S:.0f} s"
    if run.status == 0:
        return "SURVIVED"
    if run.status == 1 and failed and failed.trouble == "failure" and ASSERTION.match(failed.message):
        return None
    said = failed.message.splitlines()[0][:100] if failed and failed.message else f"pytest ended with {run.status}"
    return f"no assertion failed: {said}"


def try_all(root: Path, faults: Sequence[Fault], *, jobs: int) -> int:
    """Try all faults and print a table; returns how many were not caught. Raises `Outdated`."""
    for fault in faults:
        fault.applied((root / fault.file).read_text())
    if root == ROOT:
        interpret_kernels()  # before Triton is imported
    for name in PRELOADED if root == ROOT else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies = [Path(scratch) / f"copy{number}" for number in range(jobs)]
        for copy in copies:
            copy_project(root, copy)
        tests = {fault.test for fault in faults}
        print(f"{len(tests)} tests on the unchanged project")
        if wrong := failing_before(tests, copies):
            raise Outdated("these tests do not pass without any fault:\n  " + "\n  ".join(wrong))
        missed = 0
        for run in in_parallel((Run([fault.test], fault) for fault in faults), copies):
            problem = problem_of(run)
            missed += problem is not None
            _print_row(run, problem)
    return missed


def _print_row(run: Run, problem: str | None) -> None:
    assert run.fault is not None
    what, file, test = run.fault.what, run.fault.file, run.fault.test.rpartition("/")[2]
    print(f"{what:64} {file:30} {test:100} {run.seconds:5.1f} s  {problem or 'caught'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="faults with all of these words in their entry")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at the same time (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--faults", type=Path, default=FAULTS, help="directory of the lists (default: %(default)s)")
    args = parser.parse_args()
    faults = [fault for fault in read_faults(args.faults) if all(word in str(fault) for word in args.words)]
    if not faults:
        sys.exit(f"error: no fault has these words in its entry; see {args.faults}")
    # Before torch is loaded, as in the tests' own processes. Without PJRT_DEVICE, torch_xla prints that it chooses CPU.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("BERT_SHARED_DIR", str(ROOT.parent / "shared"))
    began = time.monotonic()
    try:
        missed = try_all(args.root, faults, jobs=max(1, min(args.jobs, len(faults))))
    except (Outdated, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    minutes = (time.monotonic() - began) / 60
    print(f"{len(faults)} faults in {minutes:.1f} minutes: {len(faults) - missed} caught, {missed} not caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
