"""`python -m stages.report DIR… --out OUT`: what stages have left, on one page: OUT/report.html; and the model card,
OUT/model-card.md, which is laid beside the model as README.md.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import METRICS, TEMPORARY_SUFFIX, disk_errors, durable_file, read_json
from common.hashing import InputHashes
from stages.directory.attempts import ATTEMPTS
from stages.directory.command import run
from stages.directory.manifest import IDENTITY, MANIFEST, Identity, Output, StageDirectory
from stages.view.card import CARD, card, is_edited
from stages.view.page import page
from stages.view.run import Run, Settings
from stages.view.status import StageStatus

PAGE = "report.html"
MODEL_CARD = "model-card.md"
#: What a page shows of a stage.
_SHOWN = (MANIFEST, METRICS, ATTEMPTS)


def report(work: StageDirectory, view: Run) -> None:
    """Write the page and the card, lay the card beside the model, and finish.

    The card in the model's directory is no output, because people edit it: the stage is complete as long as there is
    one. One that was edited is kept.
    """
    _write(work.path / PAGE, page(view))
    text = card(view)
    _write(work.path / MODEL_CARD, text)
    present = []
    if view.model is not None:
        beside = view.model / CARD
        beside.with_name(CARD + TEMPORARY_SUFFIX).unlink(missing_ok=True)  # of a run that was killed
        if beside.exists() and is_edited(beside.read_text(encoding="utf-8", errors="replace")):
            print(f"note: {beside} was edited, so it stays as it is; the new one is {work.path / MODEL_CARD}")
        else:
            _write(beside, text)
        present.append(os.path.relpath(beside, work.path))
    outputs = [Output.of(work.path, work.path / name) for name in (PAGE, MODEL_CARD)]
    work.finish(outputs, {"stages": len(view.stages)}, present=present)


def _write(path: Path, text: str) -> None:
    with durable_file(path) as file:
        file.write(text.encode())


def refresh(path: Path, view: Run) -> None:
    """Put the page at `path`, whole or not at all; not durable, since it is written anew soon. Raises `DiskError`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    text = page(view)
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def view_of(directories: list[Path], settings: Settings | None) -> Run:
    """The run that left `directories`, in that order. Without `settings`, those that decided each stage are shown.

    It is looked at as of when the last of them ended, so the same directories make the same page.

    Raises `UserError` for a directory that no stage has made.
    """
    for directory in directories:
        if not (directory / IDENTITY).exists():
            raise UserError(f"{directory} has no {IDENTITY}; give directories of stages, such as work/latest/evaluate")
    stages = [StageStatus.of_directory(directory) for directory in directories]
    if settings is None:
        settings = {
            stage.stage: {key: str(value) for key, value in _flat(stage.record.get("parameters", {})).items()}
            for stage in stages
        }
    ended = [attempt.ended for stage in stages for attempt in stage.attempts]
    return Run(stages, settings, written=max(ended, default=time.time()))


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """With the objects among them laid open: {"model": {"hidden_size": 128}} as {"model.hidden_size": 128}."""
    found: dict[str, Any] = {}
    for key, value in parameters.items():
        found |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    return {key: "" if value is None else value for key, value in found.items()}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m stages.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="stage directories, in running order")
    p.add_argument("--out", type=Path, required=True, help="stage directory to fill")
    p.add_argument("--settings", type=Path, help="settings to show, a JSON file: {section: {key: text}}")
    return p


def identity(args: argparse.Namespace, view: Run) -> Identity:
    """The stages and what they have left so far, for a page can be made of an unfinished run; and the settings."""
    hashes = InputHashes()
    inputs: dict[str, Any] = {
        stage.stage: {name: hashes.sha256(directory / name) for name in _SHOWN if (directory / name).exists()}
        for stage, directory in zip(view.stages, args.directories, strict=True)
    }
    if args.settings:
        inputs["settings"] = hashes.sha256(args.settings)
    upstream = {stage.stage: str(stage.record["fingerprint"]) for stage in view.stages}
    return Identity("report", 1, inputs=inputs, upstream=upstream)


def main() -> None:
    args = parser().parse_args()
    settings = None
    if args.settings:
        settings = read_json(args.settings)
        if settings is None:
            raise UserError(f"--settings {args.settings} is not a JSON object; give {{section: {{key: text}}}}")
    view = view_of(args.directories, settings)
    with StageDirectory.begin(args.out, lambda: identity(args, view)) as work:
        report(work, view)
    print(f"report: {args.out / PAGE}")


if __name__ == "__main__":
    run(main)
