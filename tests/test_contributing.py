"""Each worked example of CONTRIBUTING.md is followed, in a copy of the checkout: its files are made, its lines are
inserted and its commands are run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.support import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## (Add .+)\n((?s:.+?))(?=^## |\Z)", TEXT, re.MULTILINE))
#: A paragraph, and the code block below it.
_STEP = re.compile(r"((?:^(?!```|#|\n).+\n)+)\n```(python|text|sh)\n((?s:.*?))^```", re.MULTILINE)
#: Tests of what all files of a kind have in common: their sizes and places, the pages made from them, their options.
TESTS = (
    *("tests/test_taste.py", "tests/test_documentation.py", "tests/trainer/test_options.py"),
    "tests/trainer/checkpoint/test_extension.py::"
    "test_a_checkpoint_without_a_state_of_the_optimizer_can_be_continued_if_there_is_none",
    "tests/trainer/checkpoint/test_resume_changes.py::test_an_optimizer_takes_over_the_same_state_or_none",
)


@dataclass(frozen=True)
class Step:
    """One code block, and what the paragraph above it says to do with it."""

    text: str
    language: str
    code: str

    def follow(self, checkout: Path) -> None:
        made = re.search(r"Make\s+`([\w/.]+)`:$", self.text)
        inserted = re.search(r"In\s+`([\w/.]+)`,\s+below\s+`(.+)`:$", self.text)
        if self.language == "sh":
            _run(self.code, checkout)
        elif made is not None:
            assert not (checkout / made[1]).exists(), f"{made[1]} exists already"
            (checkout / made[1]).write_text(self.code)
        else:
            assert inserted is not None, f"what to do with the code below this? {self.text}"
            _insert(checkout / inserted[1], inserted[2], self.code)


def _insert(path: Path, below: str, code: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    (at,) = [number for number, line in enumerate(lines) if line.strip() == below]
    path.write_text("".join([*lines[: at + 1], code, *lines[at + 1 :]]))


def _run(script: str, checkout: Path) -> None:
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": search, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=checkout, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that git tracks, and new ones that it does not ignore, so that uncommitted work is tested, too."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def test_there_is_an_example_of_each_kind() -> None:
    kinds = ("optimizer", "device", "text format", "stage")
    assert [any(title.endswith(kind) for title in SECTIONS) for kind in kinds] == [True] * len(kinds)


def steps_of(title: str) -> list[Step]:
    steps = [Step(*found) for found in _STEP.findall(SECTIONS[title])]
    assert len(steps) == SECTIONS[title].count("```") // 2
    assert steps[-1].language == "sh"
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_an_example_works_as_written(title: str, checkout: Path) -> None:
    for step in steps_of(title):
        step.follow(checkout)


@pytest.mark.slow
def test_the_examples_meet_the_standards_of_the_code_around_them(checkout: Path) -> None:
    """All in one copy, which is what is imported: none of them breaks a test of what files of its kind share."""
    for step in (step for title in SECTIONS for step in steps_of(title) if step.language != "sh"):
        step.follow(checkout)
    _run("python -m trainer.options > docs/options.md", checkout)
    _run("git init --quiet && ruff check . && ruff format --check .", checkout)
    _run(f"python -m pytest -m 'not slow' {' '.join(TESTS)}", checkout)
