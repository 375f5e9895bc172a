"""Nights that were killed, held up, refused or never started: who hears of it; and failures to notify."""

from __future__ import annotations

import datetime
import functools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UserError
from pipeline.launchers.process import ProcessResult
from pipeline.tasks.nights import states
from pipeline.tasks.nights.nightly import Nightly
from stages.directory.attempts import record_failure
from stages.directory.lock import hold
from tests.helpers.chain import Chain, finished_chain, wait_until, write_corpus
from tests.helpers.post import Post
from tests.helpers.support import assert_one_line_error
from tests.pipeline.tasks.nights.test_nightly import chain, night_of, old_night, post, provide, words

__all__ = ["chain", "post"]
LONGER = ("--Phase1-lr", "0.002", "--Phase1-max-steps", "100000", "--Phase1-ckpt-interval-steps", "0")


@pytest.fixture
def today() -> datetime.date:
    """Today, with two minutes left of it at least: the test and its commands then agree on the date."""
    while (later := datetime.datetime.now() + datetime.timedelta(minutes=2)).date() != datetime.date.today():
        time.sleep(1)
    return later.date()


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory)


def one_stage_left(chain: Chain, date: str, finished: Chain) -> Path:
    """A night that has only its evaluation left to do."""
    night = provide(chain, date, finished)
    shutil.rmtree((night / "latest" / "evaluate").resolve())
    return night


def test_a_running_tensorboard_keeps_no_night(chain: Chain, finished: Chain) -> None:
    one_stage_left(chain, "2026-11-21", finished)
    for date in ("2026-11-01", "2026-11-02"):
        old_night(chain, date, complete=True)
        (night_of(chain, date) / "tensorboard").symlink_to(Path("../../tensorboard"))
    with hold(chain.work / "tensorboard"):
        done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21"))
    assert "in use" not in done.stderr
    assert not night_of(chain, "2026-11-01").exists()
    assert night_of(chain, "2026-11-02").exists()


def test_a_night_in_the_future_is_refused_and_old_ones_of_it_count_for_nothing(
    chain: Chain, finished: Chain, today: datetime.date
) -> None:
    late = today + datetime.timedelta(days=2)
    done = chain.run(*words(chain, "Nightly", "--date", str(late)), status=35)
    assert f"night {late} is in the future; allowed: up to {today + datetime.timedelta(days=1)}" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not night_of(chain, str(late)).exists()
    # A night that was made before such dates were refused.
    old_night(chain, "2099-01-01", complete=True)
    old_night(chain, "2026-11-01", complete=True)
    night = one_stage_left(chain, "2026-11-21", finished)
    chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), "--Nights-keep", "1")
    assert (chain.work / "nights" / "latest").resolve() == night
    assert not night_of(chain, "2026-11-01").exists()
    assert night_of(chain, "2099-01-01").exists()


@pytest.mark.slow
def test_the_next_night_tells_of_one_that_was_killed_once(chain: Chain, post: Post, finished: Chain) -> None:
    night = provide(chain, "2026-11-20", finished)
    process = chain.start(*words(chain, "Nightly", "--date", "2026-11-20"), *LONGER)
    try:
        wait_until(lambda: bool(list(night.glob("pretrain-phase1-*/progress.json"))))
        assert "running" in chain.ask("nights").stdout
        assert chain.ask("nights", "--check", "--date", "2026-11-20").returncode == 0
    finally:
        process.kill()
        process.wait()
    assert (post.mails, post.hooks) == ([], [])
    # What it started is killed with it, a moment later.
    wait_until(lambda: "running" not in chain.ask("nights").stdout)
    done = chain.ask("nights", "--check", "--date", "2026-11-20", status=1)
    assert_one_line_error(done, "night 2026-11-20: killed before it could say why")
    for date in ("2026-11-21", "2026-11-22"):
        one_stage_left(chain, date, finished)
    told = [(facts["event"], facts["date"], facts["status"]) for facts in post.hooks]
    assert told == [("check", "2026-11-20", "killed")]
    chain.run(*words(chain, "Nightly", "--date", "2026-11-21"))
    (killed, complete) = post.hooks[1:]
    assert (killed["event"], killed["date"], killed["status"]) == ("failure", "2026-11-20", "killed")
    assert str(process.pid) in killed["line"]
    assert complete["status"] == "complete"
    chain.run(*words(chain, "Nightly", "--date", "2026-11-22"))
    assert [facts["status"] for facts in post.hooks[3:]] == ["complete"]
    assert post.subjects()[1] == "Luigi: Nightly 2026-11-20 is killed"


def test_a_night_is_running_while_it_prepares(tmp_path: Path) -> None:
    """Which may read a whole checkpoint: a second start meanwhile, or a kill, is one of a running night."""
    date, seen = datetime.date(2026, 11, 21), list[states.NightState | None]()

    def prepare(_: datetime.date) -> dict[str, str]:
        seen.append(states.recorded(tmp_path, date))
        raise UserError("the disk is full")

    nights = SimpleNamespace(path=tmp_path, directory=lambda _: tmp_path / str(date), prepare=prepare)
    night: Any = SimpleNamespace(nights=nights, date=date)
    with pytest.raises(UserError, match="the disk is full"):
        Nightly._run_chain(night, -1)
    (state,) = seen
    assert state is not None
    assert (state.status, state.pid) == ("running", os.getpid())


def test_a_night_that_fails_tells_of_its_last_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log also has the errors that were overcome by a retry."""
    date, directory = datetime.date(2026, 11, 21), tmp_path / "2026-11-21"
    (directory / "pretrain-phase1-0").mkdir(parents=True)

    def run(*_: object, **__: object) -> ProcessResult:
        record_failure(directory / "pretrain-phase1-0", "Traceback\nRuntimeError: the last one")
        return ProcessResult(30, None, False, "the first one", last_error="one between")

    monkeypatch.setattr("pipeline.tasks.nights.nightly.process.run", run)
    nights = SimpleNamespace(path=tmp_path, directory=lambda _: directory, prepare=lambda _: {})
    night: Any = SimpleNamespace(nights=nights, date=date)
    night._last_failure = functools.partial(Nightly._last_failure, night)
    with pytest.raises(UserError, match=r"night 2026-11-21 failed: RuntimeError: the last one \(exit status 30"):
        Nightly._run_chain(night, -1)


def test_a_night_whose_stage_another_process_makes_is_told(chain: Chain, post: Post, finished: Chain) -> None:
    directory = (provide(chain, "2026-11-21", finished) / "latest" / "evaluate").resolve()
    (directory / "manifest.json").unlink()
    with hold(directory):
        for _ in range(2):
            done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), status=10)
    (facts,) = post.hooks
    assert (facts["event"], facts["status"]) == ("failure", "held")
    assert directory.name in facts["line"]
    assert facts["line"] in done.stdout + done.stderr
    (subject,) = post.subjects()
    assert subject == "Luigi: Nightly 2026-11-21 is held"


@pytest.mark.slow
def test_a_night_that_another_holds_up_is_told_once(chain: Chain, post: Post) -> None:
    for date in ("2026-11-20", "2026-11-21"):
        provide(chain, date)
        write_corpus(chain.directory / "text" / date / "corpus.txt")
    process = chain.start(*words(chain, "Nightly", "--date", "2026-11-20"), *LONGER)
    try:
        wait_until(lambda: night_of(chain, "2026-11-20").exists())
        chain.run(*words(chain, "Nightly", "--date", "2026-11-20"), status=10)
        assert post.hooks == [], "a second start of the running night"
        wait_until(lambda: any(night_of(chain, "2026-11-20").glob("pretrain-phase1-*/progress.json")))
        for text in (chain.directory / "text" / "2026-11-20").iterdir():
            text.unlink()
        chain.run(*words(chain, "Nightly", "--date", "2026-11-20"), status=10)
        assert post.hooks == [], "nor one that finds its text rotated away"
        for _ in range(2):
            chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), status=10)
        check = chain.ask("nights", "--check", "--date", "2026-11-21", status=1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    held, checked = post.hooks
    assert (held["event"], held["date"], held["status"]) == ("failure", "2026-11-21", "held")
    assert f"night 2026-11-20 is still running, process {process.pid} on " in held["line"]
    assert " since 20" in held["line"]
    assert (checked["event"], checked["status"]) == ("check", "held")
    assert f"process {process.pid}" in check.stderr
    assert len(post.mails) == 2


def test_the_check_tells_of_a_night_that_is_missing(chain: Chain, post: Post, today: datetime.date) -> None:
    done = chain.ask("nights", "--check", status=1)
    assert_one_line_error(done, f"night {today}: missing: it was never started")
    assert "UserWarning" not in done.stderr  # of luigi, about its own settings of mail servers
    (facts,) = post.hooks
    assert (facts["event"], facts["date"], facts["status"]) == ("check", str(today), "missing")
    assert post.subjects() == [f"Luigi: Nightly {today} is missing"]
    (chain.work / "nights").mkdir(parents=True)
    (chain.work / "nights" / f"{today}.json").write_text(json.dumps({"started": "2026-11-21T01:00:00Z"}))
    assert "complete" in chain.ask("nights", "--check").stdout
    assert len(post.hooks) == 1
    refused = chain.ask("nights", "--check", "--date", "yesterday", status=35)
    assert_one_line_error(refused, "--date yesterday is not allowed", status=35)


def test_without_any_night_there_is_nothing_to_list_and_no_page(chain: Chain) -> None:
    assert chain.ask("nights").stdout == f"no night in {chain.work / 'nights'} yet\n"
    done = chain.ask("nights", "--trend")
    assert "no night is complete yet" in done.stdout
    assert "page" not in done.stdout
    assert_one_line_error(chain.ask("nights", "--trend", "--check", status=2), "not allowed with", status=2)


def test_an_end_that_cannot_be_recorded_is_let_pass(tmp_path: Path) -> None:
    """Else the webhook would not be called, and luigi would print a traceback."""
    (tmp_path / "file").touch()
    states.write_ended(tmp_path / "file" / "nights", datetime.date(2026, 11, 21), "failed", "a full disk")


@pytest.mark.slow
def test_trouble_with_telling_fails_no_complete_night(chain: Chain, finished: Chain) -> None:
    """A mail method that is not installed, and a host name that cannot exist."""
    one_stage_left(chain, "2026-11-21", finished)
    chain.config.write_text(chain.config.read_text().replace("[email]", "[email]\nmethod = sendgrid"))
    webhook = ("--Nights-webhook", f"http://{'a' * 70}.example.org/hook")
    done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), *webhook)
    assert "night 2026-11-21 is complete" in done.stderr
    assert done.stderr.count("note: the mail was not sent: ") == 1
    assert done.stderr.count("was not notified") == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_mail_that_cannot_be_sent_leaves_a_failed_night_its_status(chain: Chain) -> None:
    chain.config.write_text(chain.config.read_text().replace("[email]", "[email]\nmethod = sendgrid"))
    (chain.directory / "text" / "2026-11-21").mkdir(parents=True)
    (chain.directory / "text" / "2026-11-21" / "corpus.txt").write_bytes(b"A sentence.\n\xff\xfe broken\n")
    done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), status=30)
    assert "note: the mail was not sent: " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "address", ["http://[bad", "hooks.example.org/abc", "http://", "https://host:99999/", "http://a b/"]
)
def test_a_webhook_that_is_no_address_is_refused_at_once_and_not_shown(chain: Chain, address: str) -> None:
    done = chain.run("Nightly", "--date", "2026-11-21", "--Nights-webhook", address, status=35)
    assert_one_line_error(done, "[nights] webhook is not an address", status=35)
    assert address.split("/")[-1] in ("", "[bad") or address not in done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("[nights]\nwebhook = http://127.0.0.1/a%20b", "[nights] webhook: write %% for a %"),
        ("[mnist]\nurl = http://127.0.0.1/a%20b.tar", "[mnist] url: write %% for a %"),
        ("[nights]\nwebhook = ${NOT_SET_HERE}", "[nights] webhook: the environment variable NOT_SET_HERE is not set"),
    ],
)
def test_what_luigi_cannot_read_is_one_line(tmp_path: Path, setting: str, said: str) -> None:
    assert "NOT_SET_HERE" not in os.environ
    done = Chain(tmp_path, setting + "\n").run("Nightly", "--date", "2026-11-21", status=35)
    assert_one_line_error(done, said, status=35)
