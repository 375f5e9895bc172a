"""Damaged work directories, and terminals without Unicode: every command answers, and never with a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import luigi
import pytest
from luigi.configuration import get_config

from pipeline.__main__ import main
from pipeline.commands.status import table
from pipeline.commands.watch import screen
from pipeline.settings.load import load
from pipeline.status.live_report import view
from pipeline.status.states import statuses
from pipeline.tasks.bert import BertPhase2
from pipeline.tasks.everything import Everything
from tests.helpers.chain import LUIGI, Chain, finished_chain
from tests.helpers.support import command

#: Files that hold what the commands read.
_RECORDS = ("*/*.json", "*/*.jsonl", "*/lock", "*/checkpoints/*/*.json", "inputs.json")
_VALUES: list[Any] = [None, True, -1, 10**400, 0.5, "", "x\0y", "2026", [], [1], {}, {"a": None}]


def _truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1)])


def _empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def _fill(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.choice([bytes(200), draw.randbytes(200), b"{}", b"[]", b"null", b"[" * 100_000]))


def _insert_nuls(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    at = draw.randrange(len(content) + 1)
    path.write_bytes(content[:at] + bytes(50) + b"\n" + content[at:])


def _remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def _make_directory(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _change_a_value(path: Path, draw: random.Random) -> None:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = draw.randrange(max(1, len(lines)))
    try:
        record = json.loads(lines[at])
    except (ValueError, IndexError):
        return
    inner = record
    while isinstance(inner, (dict, list)) and inner:
        key: Any = draw.choice(sorted(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        if not isinstance(inner[key], (dict, list)) or draw.random() < 0.3:
            inner[key] = draw.choice(_VALUES)
            break
        inner = inner[key]
    lines[at] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


_DAMAGES: list[Callable[[Path, random.Random], None]] = [
    _truncate, _empty, _fill, _insert_nuls, _remove, _make_directory, _change_a_value, _change_a_value,
]  # fmt: skip


def damage(work: Path, draw: random.Random) -> str:
    """Damage a work directory in one way; returns what was done."""
    files = sorted(path for pattern in _RECORDS for path in work.glob(pattern) if path.is_file())
    path = draw.choice(files)
    if draw.random() < 0.1:
        other = draw.choice(files)
        if other != path:
            shutil.copy(other, path.with_name("swapped"))
            shutil.copy(path, other)
            os.replace(path.with_name("swapped"), path)
        return f"{path.relative_to(work)} and {other.relative_to(work)} are swapped"
    if draw.random() < 0.05:
        (path.parent / os.fsdecode(b"\xff\xfe")).mkdir(exist_ok=True)
        return f"a name that is not UTF-8 in {path.parent.relative_to(work)}"
    action = draw.choice(_DAMAGES)
    action(path, draw)
    return f"{action.__name__} {path.relative_to(work)}"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[[Chain, str], int]:
    """The exit status of a command, run in this process."""

    def status(chain: Chain, words: str) -> int:
        config = get_config()
        config.read(str(chain.config))
        load.cache_clear()
        luigi.Task.clear_instance_cache()
        try:
            if words == WATCH:  # it is redrawn until Ctrl-C; here it is drawn once
                print(screen(view(BertPhase2()), lambda width: table(statuses(Everything()), width), 100))
                return 0
            return main(words.split())
        except SystemExit as left:
            return int(left.code or 0)

    return status


WATCH = "status --watch"
COMMANDS = (
    "status",
    "status --json",
    WATCH,
    "why BertPhase2",
    "why BertPhase2 --verify",
    "report",
    "clean",
    "cancel Pretrain --phase 1",
)


@pytest.mark.slow
def test_no_damage_makes_a_traceback(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ask: Callable[[Chain, str], int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Seeded, and bounded in time: a loaded machine makes fewer tries."""
    finished = finished_chain(tmp_path_factory)
    deadline, tries = time.monotonic() + 40, 0
    while time.monotonic() < deadline and tries < 150:
        draw = random.Random(tries)
        chain = finished.copy(tmp_path / str(tries))
        done = [damage(chain.work, draw) for _ in range(draw.randint(1, 3))]
        for words in COMMANDS:
            try:
                assert ask(chain, words) in (0, 1, 35), (words, done)
            except Exception as error:
                raise AssertionError(f"try {tries}: {words} after {done}") from error
        capsys.readouterr()
        shutil.rmtree(chain.directory)
        tries += 1
    assert tries > 3


@pytest.mark.parametrize("seed", range(3))
def test_a_run_over_a_damaged_directory_ends_as_luigi_ends(
    seed: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With real processes: what was damaged is made again, or refused in one line; `try` answers or refuses so, too."""
    chain = finished_chain(tmp_path_factory).copy(tmp_path / "chain")
    draw = random.Random(seed)
    done = [damage(chain.work, draw) for _ in range(3)]
    ended = command(*LUIGI, "BertPhase2", env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert ended.returncode in (0, 30, 35), (done, ended.stderr)
    assert "Traceback" not in ended.stderr, (done, ended.stderr)
    model = sorted(path for path in (chain.work / "latest" / "merge_shards" / "model").iterdir() if path.is_file())
    _DAMAGES[seed](draw.choice(model), draw)
    asked = command("-m", "pipeline", "try", "year [MASK] day", env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert asked.returncode in (0, 1, 35), asked.stderr
    assert "Traceback" not in asked.stderr, (done, asked.stderr)


@pytest.mark.parametrize("encoding", ["ISO-8859-1", "ascii"])
def test_commands_print_where_the_terminal_has_no_unicode(
    encoding: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chain = finished_chain(tmp_path_factory).copy(tmp_path / "chain")
    for words in ("report", "status", "why Pretrain --phase 1 --Phase1-lr 5e-4"):
        changed = "--Phase1-lr" in words
        said = chain.ask(*words.split(), status=int(changed), PYTHONIOENCODING=encoding).stdout
        assert not changed or "lr: 0.005 ? 0.0005" in said
