"""A terminal that is closed, nohup, and `luigi --workers 2`: what is saved, what is left, with the real luigi."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stages.directory import attempts
from stages.directory.lock import hold
from tests.helpers.chain import Chain, prepared_chain, start_luigi, wait_until
from tests.helpers.luigid import luigid

pytestmark = pytest.mark.slow

#: Trains until it is stopped.
LONG = ("--Phase1-max-steps", "100000", "--Phase1-ckpt-interval-steps", "0")
WORKERS = ("--workers", "2")


@pytest.fixture
def chain(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """A chain whose phase 1 can train. Whatever still runs in its directory is killed afterwards."""
    yield prepared_chain(tmp_path_factory).copy(tmp_path)
    for process in running(str(tmp_path)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def running(directory: str) -> list[psutil.Process]:
    """Processes with this directory on their command line or in their settings."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            named = [*" ".join(process.cmdline()).split(), process.environ().get("LUIGI_CONFIG_PATH", "")]
            ours = process.pid != os.getpid() and any(word.startswith(directory) for word in named)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def steps_done(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def training(chain: Chain) -> Path:
    """The directory of the phase 1 that is training now."""
    wait_until(lambda: any(steps_done(path) > 3 for path in chain.work.glob("pretrain-phase1-*")))
    (directory,) = chain.work.glob("pretrain-phase1-*")
    return directory


def starts(chain: Chain) -> list[attempts.Attempt]:
    """The attempts at phase 1."""
    return [
        one
        for path in chain.work.glob("pretrain-phase1-*")
        for one in attempts.read(path, running=True, complete=False)
    ]


def assert_saved(directory: Path) -> int:
    """No process is at work there, and its last step is in a checkpoint; returns that step."""
    with hold(directory):
        saved = {int(path.name.removeprefix("ckpt_")) for path in (directory / "checkpoints").glob("ckpt_*")}
    assert steps_done(directory) in saved
    return max(saved)


def cluster(workers: int) -> tuple[str, ...]:
    return ("--Cluster-nproc-per-node", str(workers))


@contextlib.contextmanager
def in_terminal(chain: Chain, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """Luigi in the foreground of a terminal, and a function that closes the terminal."""
    ours, theirs = pty.openpty()
    process = start_luigi(
        chain.config,
        *words,
        prefix=("setsid", "--ctty"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        TERM="xterm-256color",
    )
    os.close(theirs)
    closing = threading.Event()

    def show() -> None:
        while not closing.is_set():
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    os.read(ours, 1 << 16)
                except OSError:
                    break
        os.close(ours)

    thread = threading.Thread(target=show)
    thread.start()

    def close() -> None:
        closing.set()
        thread.join()

    try:
        yield process, close
    finally:
        close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_closed_terminal_loses_nothing(chain: Chain, workers: int) -> None:
    with in_terminal(chain, "Pretrain", "--phase", "1", *LONG, *cluster(workers)) as (process, close):
        directory = training(chain)
        close()
        assert process.wait(timeout=120) == 75
    assert_saved(directory)
    assert not running(str(chain.directory))


def test_a_closed_terminal_loses_nothing_with_several_luigi_workers(chain: Chain) -> None:
    with in_terminal(chain, "Pretrain", "--phase", "1", *LONG, *WORKERS) as (process, close):
        directory = training(chain)
        close()
        assert process.wait(timeout=120) == 75
    assert_saved(directory)
    assert not running(str(chain.directory))


def test_a_console_that_nobody_reads_any_more_does_not_stop_a_run(chain: Chain) -> None:
    """`luigi … | head -1`: the rest is in the log."""
    process = start_luigi(chain.config, "Pretrain", "--phase", "1", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert (chain.latest("pretrain-phase1") / "manifest.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_under_nohup_a_run_goes_on(chain: Chain, workers: int) -> None:
    """The signal reaches luigi, torchrun and the workers, none of which ends."""
    with (chain.directory / "luigi.log").open("wb") as log:
        words = ("Pretrain", "--phase", "1", *LONG, *cluster(workers))
        process = start_luigi(chain.config, *words, prefix=("nohup",), stdout=log, stderr=log)
    directory = training(chain)
    processes = [found for found in running(str(chain.directory)) if " -m " in " ".join(found.cmdline())]
    assert len(processes) >= 1 + workers
    for found in processes:
        found.send_signal(signal.SIGHUP)
    after = steps_done(directory)
    wait_until(lambda: steps_done(directory) > after + 50)
    assert all(found.is_running() for found in processes)
    process.terminate()
    assert process.wait(timeout=120) == 75
    assert_saved(directory)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_luigi_with_several_workers_saves_and_stops(chain: Chain, signum: signal.Signals) -> None:
    process = chain.start("Pretrain", "--phase", "1", *LONG, *WORKERS)
    directory = training(chain)
    process.send_signal(signum)
    assert process.wait(timeout=120) == 75, (chain.directory / "luigi.log").read_text()
    step = assert_saved(directory)
    assert not running(str(chain.directory))
    output = (chain.directory / "luigi.log").read_text()
    assert "pretrain-phase1: interrupted; the same command resumes from here" in output
    assert "Traceback" not in output

    again = chain.start("Pretrain", "--phase", "1", *LONG, *WORKERS, log="again.log")
    wait_until(lambda: steps_done(directory) > step + 3)
    again.terminate()
    assert again.wait(timeout=120) == 75
    assert f"at step {step}\n" in (chain.directory / "again.log").read_text()


def test_ctrl_c_reaches_all_of_several_luigi_workers_once(chain: Chain) -> None:
    """A terminal sends it to luigi and to the processes of its tasks, which must not take it for a second Ctrl-C."""
    with in_terminal(chain, "Pretrain", "--phase", "1", *LONG, *WORKERS) as (process, _):
        directory = training(chain)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 75
    assert_saved(directory)


def test_nothing_is_left_of_a_killed_luigi_with_several_workers(chain: Chain) -> None:
    process = chain.start("Pretrain", "--phase", "1", *LONG, *WORKERS)
    directory = training(chain)
    process.kill()
    process.wait()
    wait_until(lambda: not running(str(chain.directory)))
    with hold(directory):
        pass


def test_with_several_workers_a_held_lock_has_the_same_status(chain: Chain) -> None:
    first = chain.start("Pretrain", "--phase", "1", *LONG)
    training(chain)
    done = chain.run("Pretrain", "--phase", "1", *LONG, *WORKERS, status=10)
    first.terminate()
    assert first.wait(timeout=120) == 75
    assert "is being made by process" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_work_directories_on_one_luigid_do_not_wait_for_each_other(chain: Chain, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with luigid(chain) as (api, _):
        first = chain.start("Pretrain", "--phase", "1", *LONG)
        training(chain)
        assert api.pretrain()
        done = chain.run("TokenizeCorpus", "--Run-work-dir", str(other))
        assert (other / "latest" / "tokenize_corpus" / "manifest.json").exists(), done.stderr
        second = chain.start("Pretrain", "--phase", "1", *LONG, "--Run-work-dir", str(other), log="other.log")
        wait_until(lambda: any(steps_done(path) > 3 for path in other.glob("pretrain-phase1-*")))
        for process in (first, second):
            process.terminate()
        assert [process.wait(timeout=120) for process in (first, second)] == [75, 75]


def test_with_luigid_a_run_resumes_at_once_however_the_last_one_ended(chain: Chain) -> None:
    """Luigid itself would consider the stage running for another 60 to 120 s."""
    with luigid(chain):
        for run, (signum, status) in enumerate(((signal.SIGINT, 75), (signal.SIGKILL, -9), (signal.SIGTERM, 75)), 1):
            process = chain.start("Pretrain", "--phase", "1", *LONG)
            # Workers left by a killed run continue for a moment: their steps do not belong to this run.
            wait_until(lambda run=run: len(starts(chain)) == run)  # type: ignore[misc]
            before = steps_done(training(chain))
            wait_until(lambda before=before: steps_done(training(chain)) > before + 3)  # type: ignore[misc]
            process.send_signal(signum)
            assert process.wait(timeout=120) == status, (chain.directory / "luigi.log").read_text()


def test_with_luigid_a_second_run_of_a_stage_names_the_first(chain: Chain) -> None:
    with luigid(chain):
        first = chain.start("Pretrain", "--phase", "1", *LONG)
        training(chain)
        done = chain.run("Pretrain", "--phase", "1", *LONG, status=10)
        assert first.poll() is None
        first.terminate()
        assert first.wait(timeout=120) == 75
    assert "is being made by luigi worker" in done.stderr
