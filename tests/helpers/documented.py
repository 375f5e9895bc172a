"""The commands in README.md, docs/*.md and the headers of configs/*.cfg, as written there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.support import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "configs").glob("*.cfg"))]
#: A command begins with variables, if any, and one of these.
_BEGINS = re.compile(
    r"(?:(?:[A-Z_]+=\S+|time) +)*(?:\S*/)?(?:luigi --module|python3? -m (?:stages|trainer|pipeline)\b|torchrun )"
)
#: A line of a block in Markdown, of a configuration's header, or of a systemd unit in a block.
_BLOCK = re.compile(r"(?:#? {2,})(?:ExecStart=)?(\S.*)")
#: Left out or to be filled in: words that no parser accepts.
_ELIDED = re.compile(r"…|\[(?!MASK)|<")


@dataclass(frozen=True)
class Documented:
    """One command, and where it is written."""

    page: str
    line: int
    #: In a table: the tutorial's side of its row; otherwise empty.
    tutorial: str
    #: The LUIGI_CONFIG_PATH in effect there; empty: none.
    config: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def commands() -> list[Documented]:
    """All of them, without words such as `…`."""
    return [found for page in PAGES for found in _of_page(page)]


def _of_page(page: Path) -> list[Documented]:
    lines = page.read_text().splitlines()
    found: list[Documented | None] = []
    of_page = config = ""
    for number, line in enumerate(lines, 1):
        if line.startswith("## "):
            config = of_page
        elif exported := re.search(r"export LUIGI_CONFIG_PATH=([\w./-]+)", line):
            config = exported[1]
            of_page = of_page or config
        elif line == "No config file is needed.":
            config = ""
        tutorial, _, ours = line.strip("|").partition(" | ") if line.startswith("|") else ("", "", line)
        block = None if tutorial else _BLOCK.match(line)
        if block is None:
            texts = re.findall(r"`([^`]+)`", ours)
        else:
            texts = [] if number > 1 and lines[number - 2].endswith("\\") else [_joined(block[1], lines[number:])]
        found += [_parsed(page.name, number, tutorial.strip(), config, text) for text in texts]
    return [command for command in found if command is not None]


def _joined(text: str, following: list[str]) -> str:
    """A command with its continuation lines."""
    for line in following:
        if not text.endswith("\\"):
            break
        text = text[:-1] + line.strip()
    return text


def _parsed(page: str, line: int, tutorial: str, config: str, text: str) -> Documented | None:
    """None: no command of ours, or no more than the name of one."""
    begin = _BEGINS.search(text)
    if begin is None or (begin.start() and not re.search(r"exec |&& |\* {2}", text[: begin.start()])):
        return None
    text = re.split(r" +#|\s(?:>>|\|&|2>&1)\s", text[begin.start() :])[0]
    text = re.sub(r'"\$\(date [^)]*\)"', "2026-11-21", text)
    if text.count("'") % 2:  # the closing quote of what a shell is told to run
        text = text.rstrip("'")
    words = shlex.split(text)
    while "=" in words[0] and not words[0].startswith("-"):
        variable, _, value = words.pop(0).partition("=")
        if variable == "LUIGI_CONFIG_PATH":
            config = value if (ROOT / value).exists() else ""
    kept = [word for word in words if not _ELIDED.search(word)]
    program = kept[0].rpartition("/")[2]
    return Documented(page, line, tutorial, config, (program, *kept[1:])) if len(kept) > 2 else None
