"""Report on stages: one page, DIR/report.html, and the model card, DIR/model-card.md, also copied to the model's
directory as README.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.errors import UserError
from common.files import METRICS, TEMPORARY_SUFFIX, durable_file, read_json
from common.hashing import InputHashes
from common.options import option
from stages.directory.attempts import ATTEMPTS
from stages.directory.command import run
from stages.directory.manifest import IDENTITY, Output, StageDirectory
from stages.directory.options import StageOptions, fingerprints, parse, stage_parser
from stages.directory.records import flat_texts
from stages.view.run import Run, Settings
from stages.view.status import StageStatus

PAGE = "report.html"
MODEL_CARD = "model-card.md"
#: The files of a stage that the page shows.
_SHOWN = (IDENTITY, METRICS, ATTEMPTS)
#: The stages that end the chain.
_ENDS = ("merge_shards", "evaluate")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(StageOptions):
    """The stages to show."""

    module: ClassVar = "stages.report"
    stage: ClassVar = "report"

    directories: tuple[Path, ...] = option(
        names=("directories",), metavar="DIR", help="stage directories, in execution order"
    )
    settings: Path | None = option(None, help="settings to show, a JSON file: {section: {key: text}}")

    def upstream(self) -> dict[str, str]:
        """Fingerprints of evaluation and model, which cover all before them; without these, of every complete stage."""
        complete = fingerprints(**{_label(directory): directory for directory in self.directories})
        return {role: complete[role] for role in _ENDS if role in complete} or complete

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        """Hashes of the files of unfinished stages, because a page can show an unfinished run."""
        if set(_ENDS) <= set(upstream):
            return {}
        unfinished = [directory for directory in self.directories if not fingerprints(stage=directory)]
        inputs: dict[str, Any] = {
            _label(directory): {n: hashes.sha256(directory / n) for n in _SHOWN if (directory / n).exists()}
            for directory in unfinished
        }
        return {**inputs, **({"settings": hashes.sha256(self.settings)} if self.settings else {})}


def _label(directory: Path) -> str:
    return StageStatus.of_directory(directory).stage


def report(work: StageDirectory, view: Run) -> None:
    """Write the page and the card, copy the card to the model's directory, and complete `work`.

    The copy is not an output, because people edit it: the stage is complete as long as a copy exists. An edited one is
    kept.
    """
    from stages.view.card import CARD, card, is_edited
    from stages.view.page import page

    _write(work.path / PAGE, page(view))
    text = card(view)
    _write(work.path / MODEL_CARD, text)
    present = []
    if view.model is not None:
        beside = view.model / CARD
        beside.with_name(CARD + TEMPORARY_SUFFIX).unlink(missing_ok=True)  # left by a killed run
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
    """Write the page to `path`. Raises `DiskError`."""
    from stages.view.page import page, write_page

    write_page(path, page(view))


def view_of(directories: list[Path], settings: Settings | None) -> Run:
    """The run that wrote `directories`, in that order. Without `settings`, shows the parameters of each stage.

    Its time is the end of the last attempt, so the same directories give the same page.

    Raises `UserError` for a directory that is not a stage's.
    """
    for directory in directories:
        if not (directory / IDENTITY).exists():
            raise UserError(f"{directory} has no {IDENTITY}; give directories of stages, such as work/latest/evaluate")
    stages = [StageStatus.of_directory(directory) for directory in directories]
    if settings is None:
        settings = {stage.stage: flat_texts(stage.record.get("parameters", {})) for stage in stages}
    ended = [attempt.ended for stage in stages for attempt in stage.attempts]
    return Run(stages, settings, written=max(ended, default=time.time()))


def parser() -> argparse.ArgumentParser:
    return stage_parser(ReportOptions, __doc__)


def main() -> None:
    options, out = parse(ReportOptions, parser())
    settings = None
    if options.settings:
        settings = read_json(options.settings)
        sections = settings.values() if settings is not None else [None]
        if not all(isinstance(one, dict) and all(isinstance(text, str) for text in one.values()) for one in sections):
            raise UserError(
                f"--settings {options.settings} is not JSON of {{section: {{key: text}}}}; give a file that is"
            )
    view = view_of(list(options.directories), settings)
    with StageDirectory.begin(out, options.identity) as work:
        report(work, view)
    print(f"report: {out / PAGE}")


if __name__ == "__main__":
    run(main)
