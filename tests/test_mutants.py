"""The list of deliberate faults fits the project, and the program that tries them tells caught from not caught.

The list itself is run by `make mutants`, which takes minutes.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.support import ROOT, assert_one_line_error, command
from tests.mutants.run import Fault, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.subject}: {fault.what}")
def test_a_fault_is_another_program(fault: Fault, tmp_path: Path) -> None:
    """Its text is found once, and the result parses and differs in more than comments."""
    source = (ROOT / fault.file).read_text()
    if fault.file.endswith(".c"):
        code = [re.sub("//.*", "", text).split() for text in (source, fault.applied(source))]
        assert code[0] != code[1]
        if shutil.which("cc"):
            check = ["cc", "-std=gnu11", "-fopenmp", "-fsyntax-only", "-x", "c"]
            faulty = tmp_path / "kernels.c"  # which includes itself
            faulty.write_text(fault.applied(source))
            subprocess.run([*check, faulty], check=True)
        return
    assert ast.dump(ast.parse(fault.applied(source))) != ast.dump(ast.parse(source))


def test_faulty_programs_know_all_of_their_names(tmp_path: Path) -> None:
    """An undefined name would be noticed by any test at all."""
    for number, fault in enumerate(fault for fault in FAULTS if fault.file.endswith(".py")):
        (tmp_path / f"fault{number}.py").write_text(fault.applied((ROOT / fault.file).read_text()))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,F822,F823", tmp_path]
    done = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_named_tests_exist() -> None:
    tests = sorted({fault.test for fault in FAULTS})
    pytest_command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(pytest_command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_no_fault_is_listed_twice() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.within, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


SUM = """
def add(a, b):
    return a + b


def double(a):
    return a + a
"""
TESTS = """
import pytest

from sums import add, double

@pytest.mark.parametrize("b", [0, 1])
def test_add(b):
    assert add(2, b) == 2 + b

def test_double():
    assert double(0) == 0

def test_wrong():
    assert add(1, 1) == 3

def test_skipped():
    pytest.skip("not here")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with two functions and their tests."""
    (tmp_path / "sums.py").write_text(SUM)
    (tmp_path / "test_sums.py").write_text(TESTS)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def fault(old: str, new: str, test: str, within: str | None = None) -> Fault:
    return Fault("sums", f"{old} → {new}", "sums.py", old, new, f"test_sums.py::{test}", within)


def tried(project: Path, faults: list[Fault], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these faults."""
    lists = project / "faults"
    lists.mkdir()
    entries = [
        {name: value for name, value in vars(fault).items() if value is not None and name != "subject"}
        for fault in faults
    ]
    tables = [
        "\n".join(["[[fault]]", *(f"{name} = {json.dumps(value)}" for name, value in e.items())]) for e in entries
    ]
    (lists / "sums.toml").write_text("\n\n".join(tables))
    return command("-m", "tests.mutants.run", "--root", str(project), "--faults", str(lists), *words)


def test_a_fault_is_caught_by_a_failed_assertion_alone(project: Path) -> None:
    faults = [
        fault("a + b", "a - b", "test_add"),
        fault("a + b", "b - a + 5", "test_add[0]"),
        fault("a + a", "a * a", "test_double"),
        fault("a + a", "a / a", "test_double"),
        fault("a + b", "a + c", "test_add[1]"),
    ]
    done = tried(project, faults, "--jobs", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    _, *rows, last = done.stdout.splitlines()
    assert {line.partition("  ")[0]: line.rpartition(" s  ")[2] for line in rows} == {
        "a + b → a - b": "caught",
        "a + b → b - a + 5": "caught",
        "a + a → a * a": "SURVIVED",
        "a + a → a / a": "no assertion failed: ZeroDivisionError: division by zero",
        "a + b → a + c": "no assertion failed: NameError: name 'c' is not defined",
    }
    assert last.startswith("5 faults in ")
    assert last.endswith(" minutes: 2 caught, 3 not caught")
    assert (project / "sums.py").read_text() == SUM


def test_with_all_caught_it_ends_with_0(project: Path) -> None:
    """If all those that were asked for are caught."""
    faults = [fault("a + b", "a - b", "test_add"), fault("a + a", "a * a", "test_double")]
    done = tried(project, faults, "test_add")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" minutes: 1 caught, 0 not caught")


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (fault("a * b", "a + b", "test_add"), "'a * b' occurs 0 times in sums.py"),
        (fault("return a", "return 2 * a", "test_add"), "'return a' occurs 2 times in sums.py"),
        (fault("a + a", "a", "test_add", within="add"), "'a + a' occurs 0 times in add in sums.py"),
        (fault("a + b", "a - b", "test_wrong"), "test_sums.py::test_wrong: failure: assert 2 == 3"),
        (fault("a + b", "a - b", "test_skipped"), "test_sums.py::test_skipped: skipped"),
        (fault("a + b", "a - b", "test_missing"), "test_sums.py::test_missing: not run; pytest ended with 4"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(project: Path, listed: Fault, said: str) -> None:
    done = tried(project, [listed])
    assert said in done.stderr
    assert_one_line_error(done)


def test_a_text_counts_in_its_function_alone() -> None:
    assert fault("return a", "return 2 * a", "test_add", within="double").applied(SUM).count("2 * a") == 1
