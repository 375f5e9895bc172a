"""Limits that keep the code small and its packages and folders separate, so that growth is a decision."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.support import ROOT
from trainer.config import TrainConfig
from trainer.models.config import ModelConfig

PACKAGES = ("pipeline", "stages", "trainer", "common")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
#: Files and functions (`file:function`) that may be longer, each with its reason.
LONGER: dict[str, str] = {}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    if name_of(path) not in LONGER:
        assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and f"{name_of(path)}:{node.name}" not in LONGER:
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name


#: What may import what inside a package: each file or folder only those listed after it. A folder in which order also
#: matters has a list of its own.
ORDER = {
    "pipeline": [
        "__init__",
        "__main__",
        "header",
        "commands",
        "tasks",
        "luigi_adapters",
        "store",
        "status",
        "launchers",
        "settings",
        "console",
    ],
    "stages": [
        # One file per command.
        *sorted(path.stem for path in (ROOT / "stages").glob("[a-z]*.py")),
        *("view", "evaluation", "examples", "tokens", "text", "store", "transfer", "directory"),
        "__init__",
    ],
    "trainer": [
        *("__main__", "machine", "options", "rollback", "loop", "resume", "build", "metrics", "replicas", "run"),
        *("launch", "workloads", "checkpoint", "state", "devices", "models", "data", "parallel", "optim"),
        *("precision", "config", "registry", "seeds", "__init__"),
    ],
}
MAX_ENTRIES = 24


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """What a file imports, anywhere in it: modules of ours, and the names of others."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inner}
    return frozenset(names - {module_of(path)})


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    """pipeline → stages → trainer → common; luigi only in the pipeline; torch_xla only in its device's file."""
    roots = {name.split(".")[0] for name in imported(path)}
    package = path.relative_to(ROOT).parts[0]
    forbidden = {
        "pipeline": {"torch", "transformers", "h5py", "numpy"},
        "stages": {"pipeline", "luigi"},
        "trainer": {"pipeline", "stages", "luigi"},
        "common": {"pipeline", "stages", "trainer", "luigi", "torch", "transformers", "h5py", "numpy"},
    }[package]
    assert not roots & forbidden
    if name_of(path) not in ("trainer/devices/xla.py", "trainer/devices/neuron_xla.py"):
        assert "torch_xla" not in roots


@pytest.mark.parametrize("package", ORDER)
def test_a_lower_folder_never_imports_a_higher_one(package: str) -> None:
    order = ORDER[package]
    there = {
        path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there == set(order)

    def height(module: str) -> int:
        parts = module.split(".")
        return -order.index(parts[1] if len(parts) > 1 else "__init__")

    for module, path in MODULES.items():
        upward = [
            name
            for name in imported(path)
            if name.split(".")[0] == package == module.split(".")[0] and height(name) > height(module)
        ]
        assert not upward, f"{module} imports {upward}"


def test_no_imports_go_in_a_circle() -> None:
    graph = {module: {name for name in imported(path) if name in MODULES} for module, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("root", [*PACKAGES, "tests", "benchmarks", "docs", "configs"])
def test_folders_are_small(root: str) -> None:
    made = {"__pycache__", ".mypy_cache", "api"}  # api: what `make docs` writes about the code
    for folder in [ROOT / root, *(path for path in (ROOT / root).rglob("*") if path.is_dir())]:
        if made & set(folder.parts):
            continue
        entries = [path.name for path in folder.iterdir() if path.name not in made]
        assert len(entries) <= MAX_ENTRIES, f"{folder.relative_to(ROOT)} has {len(entries)} entries"


@pytest.mark.parametrize("package", PACKAGES[:3])
def test_the_tests_mirror_the_source(package: str) -> None:
    """A folder of tests for each folder of a package, and no others; whole programs are tested in tests/e2e."""
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert {path.parent.name for path in (ROOT / "tests" / package).glob("*/*.py")} == folders


@pytest.mark.parametrize("path", [p for p in SOURCES if "devices" not in p.parts], ids=name_of)
def test_only_devices_asks_what_device_it_is(path: Path) -> None:
    assert not re.search(r"\.type\s*==|isinstance\([^)]*[Dd]evice", path.read_text())


@pytest.mark.parametrize("config", [ModelConfig, TrainConfig])
def test_every_field_of_a_config_is_read_somewhere(config: type) -> None:
    text = "\n".join(path.read_text() for path in SOURCES if path.name != "config.py")
    for field in dataclasses.fields(config):
        assert re.search(rf"\.{field.name}\b", text), f"{config.__name__}.{field.name} is read nowhere"


#: What takes a second to import, and what only some runs need.
LATE = (
    *("torch", "transformers", "h5py", "numpy", "pyarrow", "yaml", "jinja2", "tarfile", "tomllib"),
    "concurrent.futures.process",
    *("pipeline.launchers.kubernetes", "stages.download", "stages.transfer.fetch", "stages.view.page"),
)


@pytest.mark.parametrize("module", ["pipeline", "pipeline.__main__"])
def test_the_pipeline_imports_only_what_every_run_needs(module: str) -> None:
    """A finished pipeline and its status answer at once; half of the time is luigi's own imports."""
    late = set(LATE) - ({"pipeline.launchers.kubernetes"} if module == "pipeline.__main__" else set())
    program = f"import sys, {module}; early = {late} & set(sys.modules); assert not early, early"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_nothing_names_a_machine_or_a_registry() -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            text = path.read_text(errors="replace")
            assert not re.search(r"/(?:root|home/\w+|work/main)/", text), name
            assert not re.search(r"https?://(?:[\w.-]*pypi|[\w.-]*registry)", text), name


#: The files that use private names of luigi, and which: where to look when luigi is upgraded.
PRIVATE_NAMES_OF_LUIGI = {
    "pipeline/__main__.py": {"_build_parser"},
    "pipeline/luigi_adapters/command_line.py": {"_build_parser", "_reg"},
    "pipeline/settings/load.py": {"_config_path", "_config_paths"},
    "pipeline/settings/origin.py": {"_config_paths"},
    "pipeline/settings/parameters.py": {"_attribute_name"},
}


def test_only_these_files_use_private_names_of_luigi() -> None:
    """On objects other than `self`, and on `self` if the file does not define the name itself."""

    def defined(tree: ast.AST) -> set[str]:
        nodes = list(ast.walk(tree))
        names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        return {name for name in names | stored if name.startswith("_") and not name.startswith("__")}

    (installed,) = importlib.util.find_spec("luigi").submodule_search_locations or ()  # type: ignore[union-attr]
    files = [path for path in Path(installed).rglob("*.py") if "contrib" not in path.parts]
    luigis = set().union(*(defined(ast.parse(path.read_text())) for path in files))
    found: dict[str, set[str]] = {}
    for path in (ROOT / "pipeline").rglob("*.py"):
        tree = ast.parse(path.read_text())
        ours = defined(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in luigis:
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not of_self or node.attr not in ours:
                    found.setdefault(name_of(path), set()).add(node.attr)
    assert found == PRIVATE_NAMES_OF_LUIGI
