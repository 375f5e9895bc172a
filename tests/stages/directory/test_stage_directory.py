"""What a fingerprint is computed from, and what makes a stage directory complete."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import DiskError
from stages.directory import damaged
from stages.directory.manifest import MANIFEST, Identity, Output, StageDirectory, why_incomplete

IDENTITY = Identity(
    "shard", 3, 2, parameters={"b": 1, "a": [0.1, None]}, inputs={"text": "x"}, upstream={"tokens": "0" * 64}
)


def test_a_fingerprint_is_the_sha256_of_canonical_json() -> None:
    """Spelled out, so that a stage finished by an earlier version of this program stays finished."""
    text = (
        '{"format_version":3,"inputs":{"text":"x"},"parameters":{"a":[0.1,null],"b":1},"phase":2,"stage":"shard",'
        f'"upstream":{{"tokens":"{"0" * 64}"}}}}'
    )
    assert IDENTITY.fingerprint == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "share"}, {"format_version": 4}, {"phase": 1}, {"phase": None}, {"parameters": {"b": 1}},
        {"parameters": {"b": 1, "a": [0.1, 0]}}, {"inputs": {"text": "y"}}, {"upstream": {}},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_decides_the_result_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert dataclasses.replace(IDENTITY, **change).fingerprint != IDENTITY.fingerprint


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    with StageDirectory.begin(tmp_path, lambda: IDENTITY) as work:
        for name in ("a", "b"):
            (tmp_path / name).write_bytes(b"0123456789")
        (tmp_path / "kept").write_text("whatever is in it")
        work.finish([Output.of(tmp_path, tmp_path / name) for name in ("a", "b")], {})
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "present": ["kept"]}))
    assert why_incomplete(tmp_path, IDENTITY.fingerprint, verify=True) is None
    return tmp_path


@pytest.mark.parametrize("length", [0, 9, 11])
def test_an_output_of_another_size_is_not_complete(finished: Path, length: int) -> None:
    (finished / "b").write_bytes(b"0123456789x"[:length])
    reason = why_incomplete(finished, IDENTITY.fingerprint)
    assert reason == f"{finished / 'b'} has {length} bytes, its manifest says 10"


def test_an_altered_output_is_found_when_all_bytes_are_read(finished: Path) -> None:
    (finished / "b").write_bytes(b"0123456788")
    assert why_incomplete(finished, IDENTITY.fingerprint) is None
    assert "b was altered" in str(why_incomplete(finished, IDENTITY.fingerprint, verify=True))


@pytest.mark.parametrize("name", ["a", "b", "kept", MANIFEST])
def test_a_missing_file_is_not_complete(finished: Path, name: str) -> None:
    (finished / name).unlink()
    reason = why_incomplete(finished, IDENTITY.fingerprint)
    assert reason == ("never finished" if name == MANIFEST else f"{finished / name} is missing")


def test_what_was_made_from_other_settings_is_not_complete(finished: Path) -> None:
    other = dataclasses.replace(IDENTITY, parameters={}).fingerprint
    assert str(why_incomplete(finished, other)).startswith("made with other settings")


@pytest.mark.parametrize("relative", [False, True])
def test_of_a_damaged_stage_only_whole_files_are_kept(
    finished: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    """One file was cut; the other has its old size."""
    monkeypatch.chdir(finished)
    for name, content in (("a", b"9876543210"), ("b", b"0123")):
        (finished / name).write_bytes(content)
    with StageDirectory.begin(Path() if relative else finished, lambda: IDENTITY):
        assert sorted(path.name for path in finished.iterdir() if path.name in ("a", "b", "kept")) == ["kept"]


@pytest.mark.parametrize("name", ["../outside", "{tmp}/outside", "a/b", "a\0b"])
def test_a_manifest_that_names_other_files_removes_none_of_them(finished: Path, name: str) -> None:
    """A foreign or damaged one."""
    outside = finished.parent / "outside"
    outside.write_text("x")
    manifest = json.loads((finished / MANIFEST).read_text())
    manifest["outputs"][0]["path"] = name.replace("{tmp}", str(finished.parent))
    (finished / MANIFEST).write_text(json.dumps(manifest))
    with StageDirectory.begin(finished, lambda: IDENTITY):
        assert outside.read_text() == "x"
        assert (finished / "b").exists()
        assert not (finished / MANIFEST).exists()


def test_while_a_file_cannot_be_read_nothing_is_removed(finished: Path) -> None:
    """Not a lost mount, nor another user's file, stands for a missing one."""
    (finished / "a").unlink()
    (finished / "a").symlink_to("a")  # which nobody can open, not even root
    with pytest.raises(DiskError, match="a: Too many levels of symbolic links"):
        StageDirectory.begin(finished, lambda: IDENTITY).__enter__()
    assert (finished / MANIFEST).exists()
    assert (finished / "b").exists()


def _killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_killed_removal_of_damaged_files_is_gone_on_with(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finished / "a").write_bytes(b"0123")
    with monkeypatch.context() as patch:
        patch.setattr(damaged, "why_altered", _killed)
        with pytest.raises(KeyboardInterrupt):
            StageDirectory.begin(finished, lambda: IDENTITY).__enter__()
    assert why_incomplete(finished, IDENTITY.fingerprint) == "never finished"
    with StageDirectory.begin(finished, lambda: IDENTITY):
        assert not (finished / "a").exists()
        assert (finished / "b").exists()


def test_a_damaged_stage_has_no_manifest_while_it_is_made_again(finished: Path) -> None:
    """Whoever sees one takes the stage for complete: what pushes its checkpoints, and the other machines that make it.
    If the run is killed, a new output of the old size does not count as the old one."""
    (finished / "b").unlink()
    with StageDirectory.begin(finished, lambda: IDENTITY):
        assert not (finished / MANIFEST).exists()
        (finished / "b").write_bytes(b"another 10")
    assert why_incomplete(finished, IDENTITY.fingerprint) == "never finished"
