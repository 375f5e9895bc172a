"""Nightly through the real luigi: its own directory for each date, one at a time, mail and webhook, retries."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from zoneinfo import ZoneInfo

import luigi
import pytest
from luigi.tools.range import RangeDailyBase

from stages.directory.lock import hold
from tests.helpers.chain import Chain, finished_chain, wait_until, write_corpus
from tests.helpers.luigid import luigid
from tests.helpers.post import SETTINGS, Post, receiving
from tests.helpers.support import ROOT, assert_one_line_error, command


@pytest.fixture
def post() -> Iterator[Post]:
    with receiving() as received:
        yield received


@pytest.fixture
def chain(tmp_path: Path, post: Post) -> Chain:
    return Chain(tmp_path, SETTINGS.format(smtp=post.smtp, http=post.http))


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Its text and its work directory, when copied for a night, make that night a short one."""
    return finished_chain(tmp_path_factory)


def night_of(chain: Chain, date: str) -> Path:
    return chain.work / "nights" / date


def provide(chain: Chain, date: str, finished: Chain | None = None) -> Path:
    """Provide the text of a night and, with `finished`, a chain that has already run. Returns the night's directory."""
    (chain.directory / "text" / date).mkdir(parents=True)
    night = night_of(chain, date)
    if finished is not None:
        shutil.copy(finished.directory / "corpus.txt", chain.directory / "text" / date)
        shutil.copytree(finished.work, night, symlinks=True)
    return night


def words(chain: Chain, *given: str) -> tuple[str, ...]:
    """The words given, and the night's text: what the command line sets reaches the chain, too."""
    return (*given, "--Corpus-source", str(chain.directory / "text" / "{date}" / "*.txt"))


def old_night(chain: Chain, date: str, *, complete: bool) -> Path:
    stage = night_of(chain, date) / "tokenize_corpus-0123456789"
    stage.mkdir(parents=True)
    if complete:
        (chain.work / "nights" / f"{date}.json").write_text("{}")
    return stage


def test_a_night_runs_the_chain_and_only_the_newest_stay(chain: Chain, post: Post, finished: Chain) -> None:
    night = provide(chain, "2026-11-21", finished)
    shutil.rmtree((night / "latest" / "evaluate").resolve())
    held = old_night(chain, "2026-11-01", complete=True)
    for date, complete in {"2026-11-02": True, "2026-11-03": False, "2026-11-04": True, "2026-11-05": False}.items():
        old_night(chain, date, complete=complete)
    with hold(held):
        done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21"))
    assert "evaluate: complete" in done.stderr
    record = json.loads((chain.work / "nights" / "2026-11-21.json").read_text())
    assert Path(record["model"]).parent.parent == night
    assert (Path(record["model"]) / "config.json").exists()
    assert (chain.work / "nights" / "latest").resolve() == night
    left = {path.name for path in (chain.work / "nights").iterdir() if path.is_dir() and not path.is_symlink()}
    assert left == {"2026-11-01", "2026-11-04", "2026-11-05", "2026-11-21"}, "in use, second, unfinished after it, new"
    assert "night 2026-11-01: kept, as it is in use" in done.stderr

    ((recipients, mail),) = post.mails
    assert recipients == ["someone@example.org", "other@example.org"]
    assert mail["Subject"] == "Luigi: Nightly 2026-11-21 is complete"
    (facts,) = post.hooks
    assert facts.keys() == {"event", "task", "date", "status", "line", "work_dir", "host"}
    assert (facts["event"], facts["task"], facts["date"]) == ("completion", "Nightly", "2026-11-21")
    assert facts["line"] in done.stderr
    assert facts["work_dir"] == str(night)

    why = command("-m", "pipeline", "why", "BertPhase2", env={"LUIGI_CONFIG_PATH": str(night / "night.cfg")})
    assert why.returncode == 0, why.stdout + why.stderr
    again = chain.run(*words(chain, "Nightly", "--date", "2026-11-02"))
    assert "started" not in again.stderr, "its directory was removed, and it was done all the same"
    assert len(post.mails) == len(post.hooks) == 1


def test_a_range_goes_on_where_a_night_has_no_text(chain: Chain, post: Post, finished: Chain) -> None:
    """Luigi's own RangeDaily, with several dates in one process; the webhook refuses the first of the two messages."""
    provide(chain, "2026-11-20", finished)
    post.refusals = [404]
    days = ("--of", "Nightly", "--start", "2026-11-19", "--stop", "2026-11-21", "--days-back", "100000")
    done = chain.run(*words(chain, "RangeDaily", *days), status=35)
    missing = chain.directory / "text" / "2026-11-19" / "*.txt"
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR: ")]
    assert errors == [f"ERROR: night 2026-11-19: [corpus] source: {missing} matches no file; nothing was started"]
    assert "Traceback" not in done.stdout + done.stderr
    assert "note: the webhook at 127.0.0.1 was not notified: it answered with status 404" in done.stderr
    assert not night_of(chain, "2026-11-19").exists()
    assert (chain.work / "nights" / "2026-11-20.json").exists()
    assert [(facts["event"], facts["date"]) for facts in post.hooks] == [("completion", "2026-11-20")]
    refused, complete = post.subjects()
    assert "Nightly(date=2026-11-19) failed scheduling" in refused
    assert complete == "Luigi: Nightly 2026-11-20 is complete"


class Undone(luigi.Task):
    date: luigi.DateParameter[datetime.date] = luigi.DateParameter()

    def complete(self) -> bool:
        return False


@pytest.mark.filterwarnings("ignore:Parameter .param_name")  # luigi's own default
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Tokyo", "Pacific/Kiritimati", "America/Los_Angeles"])
@pytest.mark.parametrize("month", [1, 7])
def test_the_documented_range_ends_with_the_local_date_at_any_hour(zone: str, month: int) -> None:
    """RangeDaily itself counts days in UTC."""
    text = (ROOT / "docs" / "overnight.md").read_text()
    assert 'RangeDaily --of Nightly --start 2026-11-01 --stop "$(date -d tomorrow +%F)" --days-forward 1' in text
    for hour in range(24):
        now = datetime.datetime(2026, month, 15, hour, 30, tzinfo=ZoneInfo(zone))
        today = now.date()
        nights = RangeDailyBase(
            of=Undone, start=today - datetime.timedelta(days=3), stop=today + datetime.timedelta(days=1),
            days_forward=1, now=int(now.timestamp()),
        ).requires()  # fmt: skip
        assert [night.date for night in nights] == [today - datetime.timedelta(days=back) for back in (3, 2, 1, 0)]


def test_a_failed_night_has_tried_twice_and_tells_once(chain: Chain, post: Post) -> None:
    """The stage that fails is retried, the night is not; the webhook is told although it fails at first."""
    night = provide(chain, "2026-11-21")
    (chain.directory / "text" / "2026-11-21" / "corpus.txt").write_bytes(b"A sentence.\n\xff\xfe broken\n")
    post.refusals = [500]
    done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), status=30)
    assert (night / "stage.log").read_text().count("tokenize_corpus: started in") == 2
    assert not (chain.work / "nights" / "2026-11-21.json").exists()
    (facts,) = post.hooks
    assert (facts["event"], facts["status"]) == ("failure", "failed")
    assert "corpus.txt" in facts["line"]
    ((_, mail),) = post.mails
    assert "Nightly(date=2026-11-21) FAILED" in str(mail["Subject"])
    text = mail.get_payload()[0].get_payload(decode=True).decode()  # type: ignore[union-attr, index]
    assert facts["line"] in text
    assert facts["line"] in done.stdout + done.stderr


def test_no_setting_but_an_input_is_taken_for_a_file(chain: Chain, post: Post) -> None:
    """The tracker's project has the date in its name, and so has a store that does not exist yet."""
    provide(chain, "2026-11-21")
    corpus = chain.directory / "text" / "2026-11-21" / "corpus.txt"
    corpus.write_bytes(b"A sentence.\n\xff\xfe broken\n")
    dated = ("--Trackers-project", "bert-{date}", "--Store-url", str(chain.directory / "store-{date}"))
    chain.run(*words(chain, "Nightly", "--date", "2026-11-21", *dated), status=30)
    (facts,) = post.hooks
    assert (facts["status"], "corpus.txt" in facts["line"]) == ("failed", True), "it began, and met the broken text"


def test_machines_that_are_started_by_hand_are_refused(chain: Chain, post: Post) -> None:
    provide(chain, "2026-11-21")
    write_corpus(chain.directory / "text" / "2026-11-21" / "corpus.txt")
    two = ("--Cluster-nnodes", "2", "--Cluster-master-addr", "127.0.0.1")
    done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21", *two), status=35)
    said = "[cluster] nnodes is 2 with launcher local, and a night is started on one machine"
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_with_luigid_the_night_and_its_stages_are_in_sight_and_tried_again(
    chain: Chain, post: Post, finished: Chain
) -> None:
    """Here luigid decides about retries, by the same settings. A night right after another leaves nothing out, although
    luigid knows the stages of both by the same names."""
    night, next_night = (provide(chain, date, finished) for date in ("2026-11-19", "2026-11-20"))
    for directory in (night, next_night):
        shutil.rmtree((directory / "latest" / "evaluate").resolve())
    provide(chain, "2026-11-21")
    (chain.directory / "text" / "2026-11-21" / "corpus.txt").write_bytes(b"A sentence.\n\xff\xfe broken\n")
    (chain.directory / "token").touch()
    once = {
        "FAILPOINT": "write-before:manifest.json",
        "FAILPOINT_ACTION": "raise",
        "FAILPOINT_TOKEN": f"{chain.directory}/token",
    }
    with luigid(chain) as (api, _):
        chain.run(*words(chain, "Nightly", "--date", "2026-11-19"), **once)
        assert not (chain.directory / "token").exists()
        assert (night / "stage.log").read_text().count("evaluate: started in") == 2
        chain.run(*words(chain, "Nightly", "--date", "2026-11-20"))
        assert (next_night / "stage.log").read_text().count("evaluate: started in") == 1
        stages = {task["name"] for task in api.ask("task_list", status="DONE", upstream_status="").values()}
        assert {"Evaluate", "BertPhase2"} <= stages
        chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), status=30)
        done, disabled = (api.ask("task_list", status=s, upstream_status="").values() for s in ("DONE", "DISABLED"))
    nights = {task["params"]["date"] for task in done if task["name"] == "Nightly"}
    assert nights == {"2026-11-19", "2026-11-20"}
    assert {task["name"] for task in disabled} == {"TokenizeCorpus"}, "what has failed twice"
    assert [facts["status"] for facts in post.hooks] == ["complete", "complete", "failed"]


def test_a_second_start_is_turned_away(chain: Chain) -> None:
    provide(chain, "2026-11-21")
    write_corpus(chain.directory / "text" / "2026-11-21" / "corpus.txt")
    (chain.work / "nights").mkdir(parents=True)
    with hold(chain.work / "nights"):
        done = chain.run(*words(chain, "Nightly", "--date", "2026-11-21"), status=10)
    assert_one_line_error(done, f"process {os.getpid()} on ", status=10)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_night_leaves_nothing_running(
    chain: Chain, post: Post, finished: Chain, signum: signal.Signals
) -> None:
    """Whether the night is asked to stop or killed, its training saves first."""
    night = provide(chain, "2026-11-21", finished)
    longer = ("--Phase1-lr", "0.002", "--Phase1-max-steps", "100000", "--Phase1-ckpt-interval-steps", "0")
    process = chain.start(*words(chain, "Nightly", "--date", "2026-11-21"), *longer)
    try:
        wait_until(lambda: bool(list(night.glob("pretrain-phase1-*/progress.json"))))
        (directory,) = (path.parent for path in night.glob("pretrain-phase1-*/progress.json"))
        process.send_signal(signum)
        status = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    output = (chain.directory / "luigi.log").read_text()
    assert status == (75 if signum == signal.SIGTERM else -signal.SIGKILL), output
    with hold(chain.work / "nights"), hold(directory):  # no process holds them any more
        saved = list(directory.glob("checkpoints/ckpt_*"))
    assert len(saved) == 1
    resumes = "night 2026-11-21: interrupted; the same command resumes from here"
    assert (resumes in output) == (signum == signal.SIGTERM)
    assert (post.mails, post.hooks) == ([], [])


@pytest.mark.parametrize("keep_alive", [True, False])
def test_a_stage_that_fails_once_is_tried_again_if_luigi_stays_for_it(tmp_path: Path, keep_alive: bool) -> None:
    """Without keep_alive luigi ignores retry_count."""
    retries = "[scheduler]\nretry_count = 2\nretry_delay = 0.1\n[worker]\nwait_interval = 0.1\n"
    chain = Chain(tmp_path, f"{retries}keep_alive = {keep_alive}\n")
    (tmp_path / "token").touch()
    once = {
        "FAILPOINT": "write-before:manifest.json",
        "FAILPOINT_ACTION": "raise",
        "FAILPOINT_TOKEN": f"{tmp_path}/token",
    }
    done = chain.run("TokenizeCorpus", status=0 if keep_alive else 30, **once)
    assert not (tmp_path / "token").exists()
    assert done.stderr.count("tokenize_corpus: started in") == 1 + keep_alive
