"""The image recipes: nothing here can build them, so hadolint and these tests read their instructions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.support import ROOT
from tests.test_setup import constraints_without_cuda
from trainer.devices.neuron_lane import NATIVE, REPOSITORY, XLA, Installation, problems

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
#: The base image of each lane, and the Python of that Ubuntu release (22.04's own python3 is 3.10).
BASES = {XLA: ("ubuntu:22.04", "python3.11", (3, 11)), NATIVE: ("ubuntu:26.04", "python3", (3, 14))}
each_lane = pytest.mark.parametrize("lane", [XLA, NATIVE])
#: Images that belong to no lane of Trainium's.
OTHERS = ("cpu", "cuda")
each_image = pytest.mark.parametrize("image", [XLA, NATIVE, *OTHERS])


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, its arguments), with continued lines joined and comments removed."""
    text = (ROOT / "containers" / f"{image}.Dockerfile").read_text()
    text = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, words) for name, words in found]


def arguments(image: str, instruction: str) -> list[str]:
    return [words for name, words in instructions(image) if name == instruction]


def test_every_recipe_is_looked_at_here() -> None:
    assert {path.stem for path in (ROOT / "containers").iterdir()} == {XLA, NATIVE, *OTHERS}


@each_image
def test_it_is_a_dockerfile(image: str) -> None:
    found = instructions(image)
    assert {name for name, _ in found} <= {"FROM", "ARG", "RUN", "ENV", "COPY", "WORKDIR"}
    assert found[0] == ("FROM", BASES[image][0] if image in BASES else "python:3.13-slim")
    for words in arguments(image, "RUN"):
        script = subprocess.run(["sh", "-n", "-c", words], capture_output=True, text=True, check=False)
        assert script.returncode == 0, script.stderr
    declared = {re.split("[= ]", words)[0] for name, words in found if name in ("ARG", "ENV")}
    declared |= {"PATH", "VERSION_CODENAME"}  # from the shell and from /etc/os-release
    used = set(re.findall(r"\$\{?([A-Z_]+)", " ".join(words for _, words in found)))
    assert used <= declared


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip("hadolint has a package for Linux on x86-64 only")
    words = [program, "--no-color", *sorted((ROOT / "containers").glob("*.Dockerfile"))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@each_lane
def test_versions_come_from_pyproject_alone(lane: str) -> None:
    text = " ".join(words for _, words in instructions(lane))
    (install,) = [words for words in arguments(lane, "RUN") if "pip install" in words]
    assert f"'/src[{lane}]'" in install
    assert f"--extra-index-url=https://{REPOSITORY} " in install
    assert not re.search(r"torch\S*[=<>]=|neuronx-cc|nki", text)


@each_lane
def test_the_extra_is_a_whole_installation_of_its_lane(lane: str) -> None:
    """As the doctor judges it, for the image's Python and an instance of the lane."""
    pinned = dict(re.split("==", requirement) for requirement in EXTRAS[lane])
    versions = {name: version.removesuffix(".*") + ".0" for name, version in pinned.items()}
    instance = {XLA: "trn1.32xlarge", NATIVE: "trn2.48xlarge"}[lane]
    found = Installation(versions, (), lane == NATIVE, BASES[lane][2], instance)
    assert problems(found) == []
    assert f"{BASES[lane][1]} -m venv /opt/venv" in arguments(lane, "RUN")


@pytest.mark.parametrize("image", OTHERS)
def test_others_install_the_versions_that_are_tested(image: str) -> None:
    install = arguments(image, "RUN")[-1]
    backend, constraints = {"cpu": ("cpu", "constraints"), "cuda": ("$CUDA", "constraints-cuda")}[image]
    assert f"--torch-backend {backend} --constraint /src/{constraints}.txt /src" in install
    assert install.startswith("pip install --no-cache-dir --constraint /src/constraints.txt uv ")
    assert " --build-constraint /src/constraints.txt " in install
    assert not re.search(r"https?://", " ".join(words for _, words in instructions(image)))


def test_the_image_for_gpus_pins_no_release_of_cuda() -> None:
    (install,) = [words for words in arguments("cuda", "RUN") if "grep" in words]
    assert constraints_without_cuda(install.replace("/src/", ""), "constraints-cuda.txt")


@each_image
def test_it_copies_what_the_wheel_is_made_of_and_docker_sees_it(image: str) -> None:
    sources = [word for words in arguments(image, "COPY") for word in words.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    project = PROJECT["project"]
    needed = {
        "pyproject.toml",
        project["readme"],
        *project["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    }
    assert set(sources) == needed | ({"constraints.txt"} if image in OTHERS else set())
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == needed | {"constraints.txt"}


@each_lane
def test_everything_comes_from_aws(lane: str) -> None:
    text = " ".join(words for _, words in instructions(lane))
    hosts = set(re.findall(r"https?://([\w.-]+)", text))
    assert hosts == {REPOSITORY, "apt.repos.neuron.amazonaws.com", "efa-installer.amazonaws.com"}


@each_image
def test_it_says_that_it_was_not_built(image: str) -> None:
    path: Path = ROOT / "containers" / f"{image}.Dockerfile"
    assert ("NOT BUILT, NOR RUN ON TRAINIUM" if image in BASES else "NOT BUILT") in path.read_text().splitlines()[0]
    assert f"docker build -f containers/{image}.Dockerfile" in path.read_text()
