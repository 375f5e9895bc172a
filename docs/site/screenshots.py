"""The pictures of a first run in docs/images/: `PYTHONPATH=. python docs/site/screenshots.py [OPTION…]`.

Runs the embedded default, with these options of luigi, in a terminal whose screen pyte keeps, and draws it with rich
while phase 1 trains and at its end.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

from tests.pipeline.console.terminal import in_terminal

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
COLUMNS, ROWS = 116, 26
#: What the screen shows when the first picture is taken: phase 1, half done.
HALF = re.compile(r"pretrain-phase1 .* (4[5-9]|5\d)%")


def main() -> None:
    command, taken = ["luigi", "--module", "pipeline", "BertPhase2", *sys.argv[1:]], list[pyte.Screen]()

    def look(screen: pyte.Screen, written: bytes) -> None:
        if not taken and any(HALF.search(line) for line in screen.display):
            draw(screen, " ".join(command), "first-run")
            taken.append(screen)

    with tempfile.TemporaryDirectory(prefix="first-run-") as name:
        words, env = [sys.executable, "-m", *command], {"PYTHONPATH": str(ROOT)}
        status = in_terminal(words, env, look, columns=COLUMNS, rows=ROWS, cwd=Path(name))
    if status or not taken:
        sys.exit(f"error: the run ended with {status}, {'after' if taken else 'before'} the first picture")
    draw(taken[0], " ".join(command), "first-run-end")


def style_of(cell: pyte.screens.Char) -> str:
    """rich's name of a style that pyte has read. pyte has hexadecimal digits for the 256 colours."""
    named = {"default": "", "brown": "yellow"}.get(cell.fg, cell.fg)
    colour = f"#{named}" if re.fullmatch(r"[0-9a-f]{6}", named) else named
    return f"{colour} bold".strip() if cell.bold else colour


def draw(screen: pyte.Screen, title: str, name: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for row in range(screen.cursor.y + 1):
        line = Text()
        for style, cells in itertools.groupby((screen.buffer[row][column] for column in range(COLUMNS)), style_of):
            line.append("".join(cell.data for cell in cells), style)
        line.rstrip()
        console.print(line)
    IMAGES.mkdir(exist_ok=True)
    # In the reader's own font, not one from elsewhere.
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    (IMAGES / f"{name}.svg").write_text(console.export_svg(title=title, code_format=template))


if __name__ == "__main__":
    main()
