"""`python -m pipeline status`: reports the true state of every stage."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from common.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, EXIT_USER_ERROR
from pipeline.status.stage_dirs import size_bytes
from pipeline.status.states import State
from stages.directory.attempts import record_failure, recording
from stages.directory.lock import hold
from tests.helpers.chain import STAGES, Chain, finished_chain, wait_until, write_corpus
from tests.helpers.support import ROOT, assert_one_line_error, command


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A chain that has run to its end; tests that change it take a copy."""
    return finished_chain(tmp_path_factory)


def test_a_finished_chain_is_complete_in_running_order(chain: Chain) -> None:
    rows = chain.status()
    assert sorted(rows) == sorted(STAGES)
    order = list(rows)
    by_fingerprint = {chain.manifest(stage)["fingerprint"]: stage for stage in STAGES}
    for stage, row in rows.items():
        manifest = chain.manifest(stage)
        assert (row["state"], row["when"], row["seconds"]) == ("complete", manifest["started"], manifest["seconds"])
        assert Path(row["directory"]).resolve() == chain.latest(stage)
        upstream = manifest["upstream"]
        assert isinstance(upstream, dict)
        assert all(order.index(by_fingerprint[up]) < order.index(stage) for up in upstream.values())


def test_the_table_has_a_line_for_each_stage(chain: Chain) -> None:
    header, *lines = chain.ask("status", COLUMNS="400").stdout.splitlines()
    assert header.split() == ["stage", "state", "when", "how", "long", "where"]
    assert [line.split()[0] for line in lines] == list(chain.status())
    for line in lines:
        stage, state, day, clock, took, where = line.split()
        assert state == "complete"
        assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", f"{day} {clock}")
        assert re.fullmatch(r"\d+:\d\d", took)
        assert Path(where).resolve() == chain.latest(stage)


@pytest.mark.parametrize("columns", [30, 50, 80, 120])
def test_a_narrow_terminal_gets_lines_that_fit_it(chain: Chain, columns: int) -> None:
    """Only a path, which has to be whole to be copied, may be longer; below a width of 40 the first two columns are."""
    lines = chain.ask("status", "--Phase2-lr", "1e-4", COLUMNS=str(columns)).stdout.splitlines()
    for line in lines:
        assert len(line) <= columns or len(line.split()) == 1 or line.startswith("where: ") or columns < 40, line
    text = "\n".join(lines)
    for stage in STAGES:
        assert re.search(rf"^{stage}\b", text, re.MULTILINE)
    assert re.search(r"lr:\s+0.002\s+→\s+0.0001", text)


def test_it_answers_without_torch(chain: Chain) -> None:
    chain.without_torch("from pipeline.__main__ import main\nassert main(['status']) == 0\n")


def test_a_rerun_of_a_finished_chain_starts_nothing(chain: Chain) -> None:
    assert ": started in " not in chain.run("BertPhase2").stderr


def test_it_changes_nothing(chain: Chain, tmp_path: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(copy.work.rglob("*")) if path.is_file()}

    copy = chain.copy(tmp_path / "copy")
    time.sleep(2.1)  # the hash of a file that has not changed for two seconds is cached
    copy.status()
    before = content()
    copy.ask("status")
    copy.ask("status", "--Phase1-lr", "0.5")
    assert content() == before


def test_before_the_first_run_every_stage_says_what_it_waits_for(tmp_path: Path) -> None:
    rows = Chain(tmp_path).status()
    assert {row["state"] for row in rows.values()} == {"waiting"}
    assert rows["tokenize_corpus"]["detail"] == "its turn is next"
    assert rows["shard_dataset-phase2"]["detail"] == "for tokenize_corpus"
    assert rows["merge_shards"]["detail"] == "for pretrain-phase2, tokenize_corpus"


def test_a_chain_run_up_to_a_stage(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.run("ShardDataset", "--phase", "1")
    rows = chain.status()
    assert {stage for stage, row in rows.items() if row["state"] == "complete"} == {
        "tokenize_corpus",
        "shard_dataset-phase1",
    }
    assert rows["shard_dataset-phase2"]["detail"] == "its turn is next"
    assert rows["pretrain-phase1"]["detail"] == "for precompile-phase1"


def test_a_held_lock_is_running_and_is_left_alone(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    directory = copy.latest("pretrain-phase2")
    (directory / "manifest.json").unlink()
    progress = {"label": "phase 2", "done": 3, "total": 4, "unit": "steps", "per_s": 0.5}
    (directory / "progress.json").write_text(json.dumps(progress))
    with hold(directory):
        lock = (directory / "lock").read_bytes()
        row = copy.status()["pretrain-phase2"]
        assert (row["state"], row["host"], row["pid"]) == ("running", socket.gethostname(), os.getpid())
        assert row["when"] == json.loads(lock)["started"]
        assert row["left_s"] == 2.0
        table = copy.ask("status").stdout
        assert f"process {os.getpid()}, at 3 of 4 steps, 0.5 steps/s, 0:02 left" in table
        assert (directory / "lock").read_bytes() == lock
    assert copy.status()["pretrain-phase2"]["state"] == "interrupted"
    with hold(directory):
        pass  # `status` only looked, and does not hold it


@pytest.mark.slow
def test_training_is_running_and_once_killed_interrupted(chain: Chain, tmp_path: Path) -> None:
    """Through the real luigi; the steps are those in metrics.jsonl and in the checkpoints."""
    copy = chain.copy(tmp_path / "copy")
    changes = ("--Phase1-max-steps", "200000", "--Phase1-ckpt-interval-steps", "5", "--Run-log-interval", "100000")

    def row() -> dict[str, Any]:
        return copy.status(*changes)["pretrain-phase1"]

    assert row()["state"] == "stale"
    luigi = copy.start("Pretrain", "--phase", "1", *changes)
    try:
        wait_until(lambda: (row()["done"] or 0) >= 20)
        running = row()
        assert (running["state"], running["pid"], running["total"]) == ("running", luigi.pid, 200000)
        assert running["per_s"] > 0
        assert running["left_s"] == pytest.approx((200000 - running["done"]) / running["per_s"], rel=1e-2)
    finally:
        luigi.send_signal(signal.SIGKILL)
        luigi.wait()
    wait_until(lambda: row()["state"] != "running")
    killed = row()
    directory = Path(killed["directory"])
    assert (killed["state"], killed["total"]) == ("interrupted", 200000)
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    # Both are written at each checkpoint at the latest, metrics.jsonl first; the kill may fall between them.
    assert last - 5 <= killed["done"] <= last
    saved = max(int(path.name.removeprefix("ckpt_")) for path in (directory / "checkpoints").glob("ckpt_*[0-9]"))
    where, spent = killed["detail"].split("; ", 1)
    assert where == f"at {killed['done']:,} of 200,000 steps, resumes from step {saved}"
    assert re.match(r"goodput \d+\.\d%; lost: (starting|steps done again|waiting for \w+) ", spent)
    # Without progress.json the newest finished checkpoint is all that is known.
    (directory / "progress.json").unlink(missing_ok=True)
    assert row()["done"] == saved
    (directory / "checkpoints" / f"ckpt_{saved}" / "manifest.json").unlink()
    assert row()["done"] < saved


def test_a_failed_stage_shows_its_last_error_line(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(b"A sentence.\n\xff\xfe broken\n")
    chain.run("BertPhase2", status=30)
    rows = chain.status()
    failed = rows.pop("tokenize_corpus")
    assert failed["state"] == "failed"
    assert str(tmp_path / "corpus.txt") in failed["detail"]
    assert (Path(failed["directory"]) / "stage.log").read_text().count(failed["detail"]) == 1
    assert {row["state"] for row in rows.values()} == {"waiting"}
    write_corpus(tmp_path / "corpus.txt")
    chain.run("TokenizeCorpus")
    assert chain.status()["tokenize_corpus"]["state"] == "complete"


def test_of_a_traceback_what_was_raised_is_shown(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    directory = copy.latest("evaluate")
    (directory / "manifest.json").unlink()
    error = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nKeyError: 3'
    record_failure(directory, error)
    row = copy.status()["evaluate"]
    assert (row["state"], row["detail"]) == ("failed", "KeyError: 3")
    with recording(directory) as record:
        record("interrupted", 75, "")
    assert copy.status()["evaluate"]["state"] == "interrupted"


def test_other_settings_make_stages_stale_from_where_they_differ(chain: Chain) -> None:
    rows = chain.status("--Phase2-lr", "1e-4")
    stale = {stage for stage, row in rows.items() if row["state"] == "stale"}
    assert stale == {"pretrain-phase2", "merge_shards", "evaluate", "report"}
    assert {row["state"] for stage, row in rows.items() if stage not in stale} == {"complete"}
    assert rows["pretrain-phase2"]["detail"] == "made with other settings: lr: 0.002 → 0.0001"
    assert rows["evaluate"]["detail"].endswith("its upstream pretrain-phase2 would change: lr: 0.002 → 0.0001")


def test_a_cut_output_is_damaged(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    model = copy.latest("merge_shards") / "model" / "model.safetensors"
    os.truncate(model, 100)
    row = copy.status()["merge_shards"]
    assert row["state"] == "damaged"
    assert "model.safetensors has 100 bytes" in row["detail"]


def test_what_nothing_needs_any_more_is_not_said_to_be_waited_for(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    shutil.rmtree(copy.latest("tokenize_corpus"))
    row = copy.status()["tokenize_corpus"]
    assert (row["state"], row["detail"]) == ("waiting", "not needed: all that is made from it is complete")
    assert "started" not in copy.run("BertPhase2").stderr


def test_a_missing_corpus_is_a_line_in_the_table(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    (copy.directory / "corpus.txt").unlink()
    rows = copy.status()
    refused = rows.pop("tokenize_corpus")
    assert refused["state"] == "refused"
    assert "corpus.txt matches no file" in refused["detail"]
    assert {row["state"] for row in rows.values()} == {"waiting"}
    assert rows["shard_dataset-phase1"]["detail"] == "for tokenize_corpus"


@pytest.mark.parametrize("asked", [("status",), ("why", "BertPhase2"), ("clean",)], ids=lambda words: words[0])
def test_settings_that_are_refused_are_one_line(chain: Chain, tmp_path: Path, asked: tuple[str, ...]) -> None:
    environment = {"LUIGI_CONFIG_PATH": str(chain.config)}
    done = command("-m", "pipeline", *asked, "--Phase1-lr", "fast", env=environment)
    assert_one_line_error(done, "[phase1] lr = 'fast'", status=35)
    config = tmp_path / "test.cfg"
    config.write_text("[phase1]\nlearning_rate = 1\n")
    done = command("-m", "pipeline", *asked, env={"LUIGI_CONFIG_PATH": str(config)})
    assert_one_line_error(done, "[phase1] learning_rate is not a setting", status=35)


@pytest.mark.parametrize("words", [("status", "--Phase3-lr", "1"), ("status", "extra"), ("stauts",)], ids=str)
def test_unknown_words_end_with_2(words: tuple[str, ...]) -> None:
    done = command("-m", "pipeline", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_page_for_the_night_explains_every_state_and_every_exit_code() -> None:
    page = (ROOT / "docs" / "recovery.md").read_text()
    explained = set(re.findall(r"^\| (\S+) \|", page, re.MULTILINE))
    assert set(get_args(State)) <= explained
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "luigi.cfg")
    assert {"0", "2", str(EXIT_INTERRUPTED), *parser["retcode"].values()} <= explained
    assert {str(EXIT_USER_ERROR), str(EXIT_SOFTWARE)} <= explained


@pytest.mark.parametrize("asked", ["status", "why", "clean"])
def test_every_command_has_help(asked: str) -> None:
    done = command("-m", "pipeline", asked, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 4
    assert asked in command("-m", "pipeline", "--help").stdout


def test_a_directory_is_measured_while_its_files_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").write_bytes(b"12345")
    replaced, walk = tmp_path / "stage.json.tmp", os.walk
    replaced.write_bytes(b"1")

    def listed_then_renamed(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(top):
            replaced.unlink()
            yield found

    monkeypatch.setattr(os, "walk", listed_then_renamed)
    assert size_bytes(tmp_path) == 5
