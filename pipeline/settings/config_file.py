"""A settings file as a person sees it: each key with its value, its line and the comment above it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: What configparser reads as a section and as a key, in a line without its indentation.
_SECTION = re.compile(r"\[(.+)\]")
_KEY = re.compile(r"(?P<key>[^\s#;\[=:][^=:]*?)\s*[=:]\s*(?P<value>.*)")
#: The files of the project: in a checkout one level above the package, in an installed package inside it.
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Entry:
    """A key, or with an empty `key` the header of a section."""

    section: str
    key: str
    value: str
    #: Line number in the file, from 1.
    line: int
    #: The lines directly above it, without "# ".
    comment: tuple[str, ...]


def project_file(name: str) -> Path:
    """luigi.cfg with the defaults, or one of configs/."""
    return next(path for path in (_PACKAGE / name, _PACKAGE.parent / name) if path.exists())


def entries(text: str) -> Iterator[Entry]:
    """The headers and keys of a file that configparser accepts, in order."""
    section, comment = "", list[str]()
    deepest: float = math.inf  # of the next key; a line that is indented more continues the last value
    lines = text.splitlines()
    for at, line in enumerate(lines):
        depth = _indentation(line)
        if depth <= deepest and (header := _SECTION.match(line, depth)):
            section, deepest = header[1], math.inf
            yield Entry(section, "", "", at + 1, tuple(comment))
        elif depth <= deepest and (found := _KEY.match(line, depth)):
            deepest = depth
            value = [found["value"], *_continuation(lines[at + 1 :], depth)]
            yield Entry(section, found["key"].replace("-", "_"), "\n".join(value).strip(), at + 1, tuple(comment))
        comment = [*comment, line[1:].removeprefix(" ")] if line.startswith("#") else []


def by_section(text: str) -> Mapping[str, Mapping[str, Entry]]:
    """The keys of a file by section and name."""
    found: dict[str, dict[str, Entry]] = {}
    for entry in entries(text):
        found.setdefault(entry.section, {})
        if entry.key:
            found[entry.section][entry.key] = entry
    return found


def not_utf8() -> Path | None:
    """The first settings file among those that luigi reads that is not UTF-8."""
    for name in ("/etc/luigi/luigi.cfg", "luigi.cfg", os.environ.get("LUIGI_CONFIG_PATH", "")):
        try:
            Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return Path(name)
        except OSError:
            continue
    return None


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _continuation(lines: list[str], depth: int) -> Iterator[str]:
    """The lines that continue a value: those that are indented more than its key. There may be empty lines and comments
    between them."""
    for line in lines:
        text = line.strip()
        if not text or text.startswith(("#", ";")):
            continue
        if _indentation(line) <= depth:
            return
        yield text
