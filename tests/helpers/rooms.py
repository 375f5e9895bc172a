"""The rooms of the packages and the imports between them, as docs/architecture.md draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.test_taste import MODULES, ORDER, PACKAGES, imported

Arrows = set[tuple[str, str]]


def between_packages() -> Arrows:
    return reduced({(a.split(".")[0], b.split(".")[0]) for a, b in _imports()})


def inside(package: str) -> Arrows:
    """Between the rooms of a package. Files at its top level are in one room above its folders or one below them
    (`ORDER`): `package` and `package (base)`."""
    ours = ((a, b) for a, b in _imports() if a.split(".")[0] == b.split(".")[0] == package)
    return reduced({(_room(a), _room(b)) for a, b in ours})


def mermaid(arrows: Iterable[tuple[str, str]]) -> str:
    """The lines of a flowchart, sorted."""
    return "\n".join(f"    {_node(a)} --> {_node(b)}" for a, b in sorted(arrows))


def reduced(arrows: Arrows) -> Arrows:
    """Without arrows to itself, and without those that a longer way implies."""
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


def _room(module: str) -> str:
    package, *inner = module.split(".")
    order = ORDER[package]
    folders = [name for name in order if MODULES.get(f"{package}.{name}", MODULES[package]).name == "__init__.py"]
    folders = [name for name in folders if name != "__init__"]
    name = inner[0] if inner else "__init__"
    if name in folders:
        return f"{package}/{name}"
    return package if order.index(name) < order.index(folders[-1]) else f"{package} (base)"


def _node(room: str) -> str:
    return f'{room.replace("/", "_").replace(" (", "_").rstrip(")")}["{room}"]'


if __name__ == "__main__":
    for title, arrows in [("packages", between_packages()), *((name, inside(name)) for name in PACKAGES[:3])]:
        print(f"### {title}\n\n```mermaid\nflowchart TD\n{mermaid(arrows)}\n```\n")
