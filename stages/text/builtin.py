"""Text that is installed anyway: Python's language reference topics, and docstrings of its library and of packages."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# Tests hold little prose; the others are not part of the library, or missing from some installations.
_SKIPPED_FOLDERS = {
    "__pycache__", "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "lib-dynload", "turtledemo",
    "pydoc_data", "ensurepip",
}  # fmt: skip

#: Packages with much prose, used if installed: dependencies of this project, and of most builds of torch.
PACKAGES = ("numpy", "networkx", "sympy", "torch")

_ROLE = re.compile(r":[a-zA-Z:]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`")
_QUOTED = re.compile(r"``([^`]+)``|`([^`]+)`_{0,2}")
_EMPHASIS = re.compile(r"(?<!\w)\*{1,2}(\w[^*\n]*?)\*{1,2}(?!\w)")
_RULE = re.compile(r"^[^\w\s]{3,}$")
_ITEM = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s+")
_LETTERS = re.compile(r"[A-Za-z]{2,}.*[A-Za-z]{2,}")


@functools.cache
def builtin_documents() -> tuple[list[str], Counter[str]]:
    """All documents in a fixed order (one per topic or module, one paragraph per line), and drop counts by reason.

    About 10 MB, each paragraph once; identical in every run with the same versions of Python and of `packages`.
    """
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    documents = []
    for texts in (*_topics(), *_modules(dropped)):
        lines = []
        for line in (line for text in texts for line in _paragraphs(text)):
            if line in seen:
                dropped["paragraphs: seen before"] += 1
            elif not _LETTERS.search(line):
                dropped["paragraphs: no words"] += 1
            else:
                seen.add(line)
                lines.append(line)
        if lines:
            documents.append("\n".join(lines))
        else:
            dropped["modules: no new text"] += 1
    return documents, dropped


def packages() -> dict[str, str]:
    """The version of each of `PACKAGES` that is installed, without a build label such as that of 2.9.1+cpu."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name).partition("+")[0]
    return found


def _topics() -> Iterator[list[str]]:
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    for name in sorted(topics):
        yield [topics[name]]


def _modules(dropped: Counter[str]) -> Iterator[list[str]]:
    for root in (Path(sysconfig.get_path("stdlib")), *map(_folder, packages())):
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]):
                try:
                    yield list(_docstrings(path))
                except (SyntaxError, ValueError, OSError):
                    dropped["modules: not to be parsed"] += 1


def _folder(package: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.origin is not None, package
    return Path(spec.origin).parent


def _docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, in source order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pending: list[ast.AST] = [ast.parse(path.read_bytes())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=True)
            if text:
                yield text
        # Only statements hold definitions; skipping expressions makes this twice as fast.
        pending.extend(child for child in reversed(list(ast.iter_child_nodes(node))) if isinstance(child, ast.stmt))


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs and list items of a docstring, one per line, without examples, rules and markup."""
    after_colons = False
    for block in re.split(r"\n[ \t]*\n", inspect.cleandoc(text)):
        lines = [line for line in block.expandtabs().split("\n") if line.strip() and not _RULE.match(line.strip())]
        if not lines:
            continue
        indented = all(line.startswith("  ") for line in lines)
        if lines[0].lstrip().startswith((">>>", ".. ")) or (after_colons and indented):
            continue
        after_colons = lines[-1].rstrip().endswith("::")
        item: list[str] = []
        for line in lines:
            if line.lstrip().startswith(">>>"):
                break
            if item and _ITEM.match(line):
                yield _plain(item)
                item = []
            item.append(line)
        if item:
            yield _plain(item)


def _plain(lines: list[str]) -> str:
    line = _ITEM.sub("", " ".join(" ".join(lines).split()))
    line = _ROLE.sub(r"\1", line)
    line = _QUOTED.sub(lambda match: match[1] or match[2], line)
    line = _EMPHASIS.sub(r"\1", line)
    return line.replace("::", ":") if line.endswith("::") else line
