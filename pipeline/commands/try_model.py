"""`python -m pipeline try "Paris is the [MASK] of France."`: predictions of the newest merged model; without a text,
prompts from held-out text that it answers right."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from common.errors import UserError
from pipeline.settings.load import load
from pipeline.status.stage_dirs import StageDir, StageDirs

SUMMARY = "the five most likely words for [MASK], by the newest merged model; for two texts, whether the second follows"


def newest_model(stage_dirs: StageDirs) -> StageDir:
    """The newest complete merged model, whatever its settings. Raises `UserError` if there is none."""
    for stage_dir in stage_dirs.by_label["merge_shards"]:
        if stage_dir.is_complete:
            return stage_dir
    work_dir = stage_dirs.work_dir
    raise UserError(
        f"there is no merged model in {work_dir} yet; make one with `luigi --module pipeline BertPhase2`, or name "
        f"another with --model DIR"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="one text with [MASK], or two texts; quote each; none: suggests some"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="another Hugging Face directory")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="its tokenizer's, if that is elsewhere")


def suggestions(stage_dirs: StageDirs, model: StageDir) -> list[str]:
    """Held-out prompts that `model` answers right, as lines; one line says why there is none. Raises `UserError`."""
    for stage_dir in stage_dirs.by_label["evaluate"]:
        if stage_dir.is_complete and stage_dir.record["upstream"].get("merge_shards") == model.fingerprint:
            break
    else:
        raise UserError(
            "the model has not been evaluated yet, so no prompt is known; finish the run, or give a text with [MASK]"
        )
    prompts = stage_dir.record["counts"].get("prompts")
    if prompts is None:
        raise UserError(
            f"{stage_dir.path.name} has no prompts (it was made by an earlier version, or without held-out text or "
            f"tokenizer); give a text with [MASK]"
        )
    if not prompts:
        return ["none of the held-out prompts is answered correctly: little more than word frequencies was learned"]
    lines = ["held-out text, and the model's answers, which are right and not the most frequent words:"]
    for one in prompts:
        lines += [
            f"  python -m pipeline try {shlex.quote(one['prompt'])}",
            f"    {one['probability']:7.2%}  {one['answer']}",
        ]
    return lines


def run(args: argparse.Namespace) -> int:
    """Run `stages.predict` in a process that may import torch; returns its exit status."""
    options = [f"--tokenizer={args.tokenizer}"] if args.tokenizer else []
    model = args.model
    if model is None:
        stage_dirs = StageDirs(load().work_dir)
        newest = newest_model(stage_dirs)
        model = newest.path / "model"
        print(f"model: {model}", file=sys.stderr)
        if not args.texts:
            print(*suggestions(stage_dirs, newest), sep="\n")
            return 0
    if not args.texts:
        raise UserError(
            "prompts are known only for the model of these settings; give one text with [MASK], or two texts"
        )
    words = [sys.executable, "-m", "stages.predict", *options, "--", str(model), *args.texts]
    return subprocess.run(words, check=False).returncode
