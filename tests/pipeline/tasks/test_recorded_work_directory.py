"""A work directory recorded earlier is still complete: nothing is made again. Recorded with Evaluate's format 2, and
Precompile's, whose graphs have changed since."""

from __future__ import annotations

import configparser
import json
from pathlib import Path
from typing import Any

from tests.helpers.chain import STAGES, Chain
from tests.helpers.support import ROOT
from tests.pipeline.tasks.test_fingerprints import THEN

RECORDED = ROOT / "tests" / "fixtures" / "work_directory"


def lay_out(directory: Path) -> dict[str, Any]:
    """Lay out the recorded work directory, its outputs as files of the recorded sizes; returns its records by stage."""
    (directory / "corpus.txt").write_bytes((RECORDED / "corpus.txt").read_bytes())
    stages: dict[str, Any] = json.loads((RECORDED / "stages.json").read_text())
    for name, records in stages.items():
        stage = directory / "work" / name
        for output in records["manifest.json"]["outputs"]:
            path = stage / output["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(output["bytes"])
        for record, content in records.items():
            (stage / record).write_text(json.dumps(content))
        for present in records["manifest.json"].get("present", []):
            (stage / present).touch()
    return {name.rpartition("-")[0]: records for name, records in stages.items()}


def test_a_recorded_work_directory_is_complete(tmp_path: Path) -> None:
    recorded = lay_out(tmp_path)
    assert set(recorded) == set(STAGES)
    chain = Chain(tmp_path)
    config = configparser.ConfigParser(interpolation=None)
    config.read(chain.config)
    for section, key, value in THEN:
        if not config.has_option(section, key):
            config.set(section, key, value)
    with chain.config.open("w") as file:
        config.write(file)
    for stage, row in chain.status().items():
        if stage.startswith("precompile"):  # compiled again only when a training needs it
            assert row["state"] == "stale"
            assert "format_version: 2 → 3" in row["detail"]
            assert "not needed: all that is made from it is complete" in row["detail"]
        else:
            assert row["state"] == "complete", row
            assert row["fingerprint"] == recorded[stage]["manifest.json"]["fingerprint"]
    assert "started in" not in chain.run("BertPhase2").stderr
