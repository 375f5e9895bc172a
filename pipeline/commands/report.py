"""`python -m pipeline report`: one page on the whole run, as it is now."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.settings.load import load
from pipeline.status.live_report import view
from pipeline.tasks.bert import BertPhase2
from stages.report import PAGE, refresh

SUMMARY = "write WORK/report.html: curves, evaluation, time line, settings; at any time, also while training"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help=f"where to write the page (default: WORK/{PAGE})")


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    path: Path = args.out or load().work_dir / PAGE
    now = view(BertPhase2())
    refresh(path, now)
    print(f"{path}: {now.headline[1]}")
    return 0
