"""The folders of the packages and the imports between them, as docs/architecture.md draws them.

`python -m tests.helpers.import_graph` redraws them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from tests.helpers.support import ROOT
from tests.test_taste import MODULES, ORDER, PACKAGES, imported

PAGE = ROOT / "docs" / "architecture.md"
#: The page's headings above a diagram: of the packages, then of the folders in each package that has any.
TITLES = ("Architecture", *PACKAGES[:3])
Arrows = set[tuple[str, str]]


def between_packages() -> Arrows:
    return reduced({(a.split(".")[0], b.split(".")[0]) for a, b in _imports()})


def inside(package: str) -> Arrows:
    """Between the parts of a package: its folders, its top-level files above all of them (`package`), and those between
    or below folders (`package: their names`), as in `ORDER`."""
    ours = ((a, b) for a, b in _imports() if a.split(".")[0] == b.split(".")[0] == package)
    return reduced({(_folder_of(a), _folder_of(b)) for a, b in ours})


def mermaid(title: str) -> str:
    """The lines of the flowchart below the heading `title`, sorted."""
    arrows = between_packages() if title == TITLES[0] else inside(title)
    return "\n".join(f"    {_node(a)} --> {_node(b)}" for a, b in sorted(arrows))


def drawing(text: str, title: str) -> str:
    """The same lines, as the page `text` has them."""
    section = re.split(rf"^#+ {title}$", text, flags=re.MULTILINE)[1]
    found = re.search(r"```mermaid\nflowchart TD\n(.*?)\n```", section, re.DOTALL)
    assert found is not None
    return found[1]


def reduced(arrows: Arrows) -> Arrows:
    """Without arrows from a node to itself, and without those that a longer path implies."""
    arrows = {(a, b) for a, b in arrows if a != b}
    targets = {a: {b for start, b in arrows if start == a} for a, _ in arrows}
    return {(a, b) for a, b in arrows if not any(b in _reachable(targets, c) for c in targets[a] - {b})}


def _reachable(targets: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in targets.get(waiting.pop(), set()) - found:
            found.add(target)
            waiting.append(target)
    return found


def _imports() -> Iterable[tuple[str, str]]:
    return ((module, name) for module, path in MODULES.items() for name in imported(path) if name in MODULES)


def _folder_of(module: str) -> str:
    package, *inner = module.split(".")
    order = ORDER[package]
    name = inner[0] if inner else "__init__"
    if _is_folder(package, name):
        return f"{package}/{name}"
    at = order.index(name)
    above = [other for other in order[:at] if _is_folder(package, other)]
    if not above:
        return package
    start = order.index(above[-1]) + 1
    files = itertools.takewhile(lambda other: not _is_folder(package, other), order[start:])
    return f"{package}: {', '.join(sorted(other for other in files if other != '__init__'))}"


def _is_folder(package: str, name: str) -> bool:
    path = MODULES.get(f"{package}.{name}")
    return path is not None and path.name == "__init__.py"


def _node(folder: str) -> str:
    return f'{re.sub("[^a-z0-9]+", "_", folder)}["{folder}"]'


if __name__ == "__main__":
    text = PAGE.read_text()
    for title in TITLES:
        text = text.replace(drawing(text, title), mermaid(title))
    PAGE.write_text(text)
