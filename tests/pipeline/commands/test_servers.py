"""`python -m pipeline luigid` and `tensorboard`: where they keep what is theirs."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from pipeline.commands import luigid, tensorboard
from pipeline.commands.tensorboard import DIRECTORY, link_runs


class Settings:
    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir


def started(monkeypatch: pytest.MonkeyPatch, work_dir: Path) -> list[str]:
    """The words that luigi's own command gets."""
    words: list[str] = []
    monkeypatch.setattr(luigid, "load", lambda: Settings(work_dir))
    monkeypatch.setattr(luigid, "luigid", words.extend)
    parsed: Any = type("Args", (), {"host": "127.0.0.1", "port": 8082})
    assert luigid.run(parsed) == 0
    return words


def test_the_state_of_luigid_is_in_the_work_directory_whatever_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """luigi puts the path into a ConfigParser, where % begins a reference."""
    words = started(monkeypatch, tmp_path / "my work 100%")
    config = configparser.ConfigParser()
    config.read_dict({"scheduler": {}})
    config.set("scheduler", "state_path", words[words.index("--state-path") + 1])
    assert Path(config.get("scheduler", "state_path")) == tmp_path / "my work 100%" / "luigid.pickle"


def test_a_state_that_cannot_be_written_is_refused_before_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=r"cannot write .*luigid.pickle: Permission denied; choose another --Run-"):
        started(monkeypatch, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        started(monkeypatch, tmp_path / "file" / "work")


def test_of_a_night_tensorboard_is_that_of_all_nights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before it has ever run, the night's link to it leads nowhere."""
    night = tmp_path / "nights" / "2026-11-25"
    (night / "pretrain-phase1-0123456789" / "tensorboard").mkdir(parents=True)
    (night / DIRECTORY).symlink_to("../../tensorboard")

    def launch(logdir: Path, host: str, port: int) -> str:
        assert logdir == tmp_path / "tensorboard" / "runs"
        assert [link.name for link in logdir.iterdir()] == ["2026-11-25-pretrain-phase1-0123456789"]
        raise UserError("launched")

    monkeypatch.setattr(tensorboard, "load", lambda: Settings(night))
    monkeypatch.setattr(tensorboard, "_launch", launch)
    monkeypatch.setattr(tensorboard.signal, "signal", lambda *_: None)  # type: ignore[attr-defined]
    parsed: Any = type("Args", (), {"host": "127.0.0.1", "port": 0})
    with pytest.raises(UserError, match="launched"):
        tensorboard.run(parsed)
    link_runs(tmp_path)
    assert len(list((tmp_path / "tensorboard" / "runs").iterdir())) == 1
