"""The pictures of a first run in docs/images/: `python docs/site/screenshots.py`, in an empty work directory.

Runs the embedded default in a terminal whose screen pyte keeps, and draws it with rich while phase 1 trains and at its
end.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
COLUMNS, ROWS = 116, 26
#: What the screen shows when the first picture is taken: phase 1, half done.
HALF = re.compile(r"pretrain-phase1 .* (4[5-9]|5\d)%")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="first-run-") as directory:
        command = ["luigi", "--module", "pipeline", "BertPhase2"]
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=directory, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        screen, is_taken = pyte.Screen(COLUMNS, ROWS), False
        stream = pyte.ByteStream(screen)
        while True:
            try:
                stream.feed(os.read(ours, 1 << 16))
            except OSError:  # the last one that had it open has ended
                break
            if not is_taken and any(HALF.search(line) for line in screen.display):
                draw(screen, " ".join(command), "first-run")
                is_taken = True
        if process.wait() or not is_taken:
            sys.exit("\n".join(screen.display))
        draw(screen, " ".join(command), "first-run-end")


def style_of(cell: pyte.screens.Char) -> str:
    colour = cell.fg if cell.fg in ("red", "green", "blue", "magenta", "cyan", "white") else ""
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
    (IMAGES / f"{name}.svg").write_text(console.export_svg(title=title))


if __name__ == "__main__":
    main()
