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
from pipeline.status.extension import EXTENDED_FROM, extended_from
from pipeline.status.live_report import view
from pipeline.status.stage_dirs import StageDirs, last_checkpoint_step
from pipeline.status.states import statuses
from pipeline.tasks.bert import BertPhase2
from pipeline.tasks.everything import Everything
from tests.helpers.chain import LUIGI, Chain, finished_chain
from tests.helpers.support import command
from trainer.metrics.budget import BUDGET, fixed_steps

#: Files that hold what the commands read.
_RECORDS = ("*/*.json", "*/*.jsonl", "*/lock", "*/checkpoints/*/*.json", "inputs.json")
_VALUES: list[Any] = [None, True, -1, 10**400, 0.5, "", "x\0y", "2026", [], [1], {}, {"a": None}]
TIME = "2026-11-26T01:02:03Z"


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


def add_records(chain: Chain) -> None:
    """A job of a scheduler that is not here; a night that a gate rejected, and one that was killed."""
    job = {"launcher": "slurm", "token": "t", "name": "x", "id": "17", "log_began": 0, "submitted": TIME}
    (chain.latest("pretrain-phase1") / "job.json").write_text(json.dumps(job))
    nights = chain.work / "nights"
    nights.mkdir()
    gate = {"accepted": False, "loss": 9.0, "reference": "2026-11-18", "reference_loss": 4.0, "tolerance": 0.1}
    record = {
        "started": TIME, "seconds": 60.5, "model": "m", "seconds_at_work": 50.5, "held_out": {"x": "1" * 64},
        "evaluation": {"masked_lm_loss": 9.0, "masked_lm_accuracy": 0.1}, "text": {"documents": 3, "tokens": 99},
        "start_from": {"night": "2026-11-18"}, "gate": gate,
    }  # fmt: skip
    (nights / "2026-11-19.json").write_text(json.dumps(record))
    state = {"status": "running", "started": TIME, "host": "h", "pid": 1, "line": ""}
    (nights / "2026-11-20.state.json").write_text(json.dumps(state))


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
    "runs",
    "runs --json",
    "compare",
    "doctor",
    "nights",
    "nights --trend",
    "nights --check --date 2026-11-20",
)


@pytest.mark.slow
def test_no_damage_makes_a_traceback(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ask: Callable[[Chain, str], int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Seeded, and bounded in time: a loaded machine makes fewer tries."""
    finished = finished_chain(tmp_path_factory)
    deadline, tries = time.monotonic() + 40, 0
    while time.monotonic() < deadline and tries < 60:
        draw = random.Random(tries)
        chain = finished.copy(tmp_path / str(tries))
        add_records(chain)
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


@pytest.mark.parametrize(
    ("stage", "where", "value"),
    [
        ("pretrain-phase2", "counts.steps", "2026"),
        ("pretrain-phase2", "parameters.max_steps", []),
        ("pretrain-phase1", "parameters.model", None),
        ("pretrain-phase2", "seconds", 10**400),
        ("pretrain-phase2", "seconds", -1e308),
        ("merge_shards", "parameters.step", "x"),
        ("evaluate", "counts.masked_lm_loss", "x"),
        ("evaluate", "counts.masked_lm_accuracy", 10**400),
        ("evaluate", "counts.samples", []),
        ("evaluate", "inputs.held_out", "x"),
    ],
)
def test_what_is_listed_of_a_manifest_may_have_any_type(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ask: Callable[[Chain, str], int],
    capsys: pytest.CaptureFixture[str], stage: str, where: str, value: Any,
) -> None:  # fmt: skip
    chain = finished_chain(tmp_path_factory).copy(tmp_path / "chain")
    path = chain.latest(stage) / "manifest.json"
    record = inner = json.loads(path.read_text())
    *outer, last = where.split(".")
    for name in outer:
        inner = inner[name]
    inner[last] = value
    path.write_text(json.dumps(record))
    for words in ("runs", "runs --json", "compare"):
        assert ask(chain, words) == 0, words
        assert chain.latest("pretrain-phase2").name in capsys.readouterr().out


def test_stages_that_name_each_other_as_upstream_are_listed_once(tmp_path: Path) -> None:
    for label, own, other in (("merge_shards", "a", "b"), ("evaluate", "b", "a")):
        (tmp_path / f"{label}-{10 * own}").mkdir()
        record = {"stage": label, "format_version": 1, "parameters": {}, "inputs": {}}
        record |= {"upstream": {"made_of": 64 * other}, "fingerprint": 64 * own}
        (tmp_path / f"{label}-{10 * own}" / "stage.json").write_text(json.dumps(record))
    stage_dirs = StageDirs(tmp_path)
    (end,) = stage_dirs.by_label["evaluate"]
    assert [one.label for one in stage_dirs.made_with(end)] == ["merge_shards", "evaluate"]


@pytest.mark.parametrize("step", [None, "8", [8]])
def test_steps_of_damaged_records_are_not_known(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, step: Any
) -> None:
    training = finished_chain(tmp_path_factory).copy(tmp_path / "chain").latest("pretrain-phase2")
    known = last_checkpoint_step(training)
    assert isinstance(known, int)
    (training / EXTENDED_FROM).write_text(json.dumps({"step": 80, "directory": "pretrain-phase2-0123456789"}))
    assert extended_from(training) == "step 80 of pretrain-phase2-0123456789"
    for path in (training / "checkpoints").glob("*/state.json"):
        size, state = path.stat().st_size, json.loads(path.read_text())
        path.write_text(json.dumps({**state, "step": step}).ljust(size))  # as long as its manifest says
        assert path.stat().st_size == size
    (training / EXTENDED_FROM).write_text(json.dumps({"step": step, "directory": "pretrain-phase2-0123456789"}))
    (training / BUDGET).write_text(json.dumps({"2": {"budget_s": 60, "max_steps": step, "training": {}}}))
    assert last_checkpoint_step(training) is None
    assert extended_from(training) is None
    assert fixed_steps(training, 2) is None


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
