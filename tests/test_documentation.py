"""The documentation names only what exists, and its pictures show the code as it is."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.helpers import import_graph
from tests.helpers.support import ROOT
from tests.test_taste import PACKAGES, SOURCES

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*PAGES, *sorted((ROOT / "configs").glob("*.cfg")), ROOT / "luigi.cfg", *SOURCES]
#: Inner folders, which the tree omits.
_INNER = {
    "pipeline/commands/doctor/",
    "pipeline/commands/init/",
    "pipeline/tasks/nights/",
    "trainer/checkpoint/interop/",
    "trainer/devices/cpu_kernels/",
    "trainer/devices/kernels/",
    "trainer/metrics/trackers/",
}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_functions_that_are_named_exist(page: Path) -> None:
    """`docs/x.md`, `trainer/loop.py`, `trainer/loop.py:Trainer.save`."""
    text, first = page.read_text(), "|".join((*PACKAGES, "tests", "benchmarks", "docs", "configs"))
    examples = re.findall(r"Make\s+`(\S+)`:", text)  # CONTRIBUTING.md's
    named = re.findall(rf"(?<![\w/.*-])((?:{first})/[\w/-]+\.(?:py|md|cfg|c|toml))(?::(\w[\w.]*\w))?", text)
    for name, symbol in named:
        assert name in examples or (ROOT / name).exists(), f"{page.name} names {name}"
        if symbol and not symbol.isdigit():
            assert symbol in symbols(ROOT / name), f"{page.name} names {name}:{symbol}"


def symbols(path: Path) -> set[str]:
    """Functions and classes of a file, and `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@every_page
def test_no_value_of_a_settings_example_has_a_comment_behind_it(page: Path) -> None:
    """luigi's parser would take it as part of the value."""
    for block in re.findall(r"(?:^ {4,}\S.*\n)+", page.read_text(), re.MULTILINE):
        if re.search(r"^ +\[\w+\]$", block, re.MULTILINE):
            assert not re.search(r"=.*\s[#;]", block), block


@every_page
def test_every_row_of_a_table_has_its_cells(page: Path) -> None:
    """Else GitHub shows bars and dashes, or drops what is too much."""
    cells: int | None = None
    above = ""
    for line in (line.strip() for line in page.read_text().splitlines()):
        found = len(re.findall(r"(?<!\\)\|", line))
        if "|--" in line:
            assert re.fullmatch(r"\|(:?-+:?\|)+", line), line
            cells = found
            assert len(re.findall(r"(?<!\\)\|", above)) == cells, above
        elif not line.startswith("|"):
            cells = None
        assert cells is None or found == cells, line
        above = line


@pytest.mark.parametrize("title", import_graph.TITLES)
def test_the_diagrams_are_the_import_graph(title: str) -> None:
    drawn = import_graph.drawing(import_graph.PAGE.read_text(), title)
    assert drawn == import_graph.mermaid(title), "draw it anew: python -m tests.helpers.import_graph"


def test_the_tree_in_the_readme_has_every_folder() -> None:
    tree = (ROOT / "README.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
    package, named = "", set()
    for line in tree.splitlines():
        names = re.findall(r"[\w.]+/", line[:26])
        if line.startswith("      "):
            named |= {package + name for name in names}
        elif names:
            package = names[-1]
            named |= set(names)
    assert named >= {f"{path.parent.relative_to(ROOT)}/" for path in SOURCES if path.name == "__init__.py"} - _INNER
    assert all((ROOT / name).is_dir() for name in named)


@pytest.mark.parametrize(("name", "lines"), [("README.md", 160), ("docs/decisions.md", 250)])
def test_what_everyone_reads_is_short(name: str, lines: int) -> None:
    """A new entry in the decisions replaces the one on its topic, or what no longer matters."""
    assert len((ROOT / name).read_text().splitlines()) <= lines


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"^/(\S+)$", (ROOT / "docs" / "site" / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT).with_suffix("")) for page in PAGES)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute and a half on one core
def test_the_site_is_made_without_a_warning(tmp_path: Path) -> None:
    """All of it, including links and the API; only its HTML is not written."""
    pages = tmp_path / "pages"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, pages / name)
    rule = re.search(r"sphinx-build (.*) -b html \. build/site", (ROOT / "Makefile").read_text())
    assert rule is not None
    words = [sys.executable, "-m", "sphinx", *rule[1].split(), "-b", "dummy", ".", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=pages, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_commit_runs_what_make_check_runs() -> None:
    rules = re.findall(r"^(?:style|check):.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in "".join(rules).splitlines()]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert [repository["repo"] for repository in config["repos"]] == ["local"]  # nothing is downloaded
    assert [hook["entry"] for hook in hooks] == checks
    for hook in hooks:
        assert (hook["language"], hook["pass_filenames"], hook["always_run"]) == ("system", False, True)


def test_the_licence_is_the_one_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert (ROOT / "LICENSE").read_text().split("\n")[1].strip() == "Version 2.0, January 2004"
