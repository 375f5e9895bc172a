"""`python -m pipeline try "Paris is the [MASK] of France."`: predictions of the newest merged model."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from common.errors import UserError
from pipeline.settings.load import load
from pipeline.status.stage_dirs import StageDirs

SUMMARY = "the five best fillings of [MASK] by the newest merged model; of two texts, whether the second follows"


def newest_model(work_dir: Path) -> Path:
    """The newest complete merged model, whatever its settings. Raises `UserError` if there is none."""
    for stage_dir in StageDirs(work_dir).by_label["merge_shards"]:
        if stage_dir.is_complete:
            return stage_dir.path / "model"
    raise UserError(
        f"there is no merged model in {work_dir} yet; make one with `luigi --module pipeline BertPhase2`, or name "
        f"another with --model DIR"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="one text with [MASK], or two texts; quote each")
    parser.add_argument("--model", type=Path, metavar="DIR", help="another Hugging Face directory")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="its tokenizer's, if that is elsewhere")


def run(args: argparse.Namespace) -> int:
    """Run `stages.predict` in a process that may import torch; returns its exit status."""
    model = args.model or newest_model(load().work_dir)
    options = [f"--tokenizer={args.tokenizer}"] if args.tokenizer else []
    if args.model is None:
        print(f"model: {model}", file=sys.stderr)
    words = [sys.executable, "-m", "stages.predict", *options, "--", str(model), *args.texts]
    try:
        return subprocess.run(words, check=False).returncode
    except KeyboardInterrupt:
        return 130
