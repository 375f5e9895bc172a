"""What is installed: less for running than for testing, in the versions that these tests run with."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.helpers.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
OURS = PROJECT["name"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_tests_run_with_the_versions_of_the_constraints() -> None:
    pinned = {canonical(one.name): one.specifier for one in CONSTRAINTS if one.marker is None or one.marker.evaluate()}
    assert {str(specifier)[:2] for specifier in pinned.values()} == {"=="}
    # Not all of sys.path: setuptools appends a folder with its own packages to it.
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    installed = {canonical(one.name): one.version for one in importlib.metadata.distributions(path=packages)}
    others = {
        name: version
        for name, version in installed.items()
        if name in pinned and not pinned[name].contains(version, prereleases=True)
    }
    assert not others, "make constraints, or install again"
    assert set(map(canonical, needed("dev"))) <= set(pinned)


def needed(*extras: str) -> set[str]:
    """The packages that the project requires, with these extras."""
    requirements = [*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])]
    found = set[str]()
    for requirement in map(Requirement, requirements):
        if requirement.name == OURS:
            found |= needed(*requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate():
            found.add(requirement.name)
    return found


def test_the_constraints_name_no_place_to_install_from() -> None:
    text = (ROOT / "constraints.txt").read_text() + (ROOT / "Makefile").read_text()
    assert not re.search(r"https?:|index-url|find-links|file:", text)
    assert not any(one.url for one in CONSTRAINTS)


def test_make_run_installs_what_running_needs_and_make_test_all(tmp_path: Path) -> None:
    """Judged by what make would do in a new environment."""

    def would(target: str) -> str:
        words = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ)
        return done.stdout

    run, test = would("run"), would("test")
    others = tmp_path / "venv" / "constraints.txt"
    assert f"--constraint {others} --torch-backend auto --editable . " in run
    assert constraints_without_cuda(run, str(others))
    assert "[dev]" not in run
    assert "--constraint constraints.txt --editable '.[dev]'" in test
    assert "luigi --module pipeline BertPhase2" in run


def test_what_installs_and_builds_is_pinned_too(tmp_path: Path) -> None:
    words = ["make", "--dry-run", "test", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    would = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ).stdout
    assert "-m pip install --quiet --constraint constraints.txt uv\n" in would
    assert " --build-constraint constraints.txt " in would
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    builders = {Requirement(one).name for one in build} | {"uv", "editables"}  # hatchling needs it for --editable
    assert builders <= {one.name for one in CONSTRAINTS}


def constraints_without_cuda(script: str, name: str) -> bool:
    """Whether the `grep` of a script writes all constraints except CUDA's libraries and Triton to this file."""
    (filtering,) = re.findall(rf"grep .* constraints.txt(?= > {re.escape(name)}\b)", script)
    kept = subprocess.run(["sh", "-c", filtering], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pinned = {one.name for one in CONSTRAINTS} - {Requirement(line).name for line in kept.splitlines()}
    return pinned == {one.name for one in CONSTRAINTS if re.search(r"-cu\d+$|^triton$", one.name)}


def test_the_note_of_make_run_says_why_pytorchs_index_was_not_used(tmp_path: Path) -> None:
    """With a stand-in for uv, which refuses the first attempt as uv does, with its reason last."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "uv").write_text('#!/bin/sh\ncase "$*" in *torch-backend*) echo first >&2; echo why >&2; exit 1;; esac\n')
    (folder / "luigi").write_text("#!/bin/sh\n")
    for name in ("uv", "luigi"):
        (folder / name).chmod(0o755)
    words = ["make", "run", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PyTorch's build for this machine was not installed: why" in done.stderr


def test_supported_versions_of_python_are_those_of_the_classifiers() -> None:
    versions = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert f"Python {versions[0]} to {versions[-1]}" in (ROOT / "README.md").read_text()
