"""Stages that hang are noticed, restarted once, and then fail with one line; stages that work are left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.console.base import nothing
from pipeline.launchers import process
from pipeline.status.chain import chain as stages_of
from pipeline.tasks.bert import BertPhase2
from pipeline.tasks.mnist import MnistMlp
from tests.helpers.chain import Chain, finished_chain
from tests.helpers.support import assert_one_line_error

#: Stops each `python -m stages.NAME` once, before its first line; with EVERY_TIME set, each time.
STOPPED = """
import os, signal, sys
name = next((word for word in sys.orig_argv if word.startswith("stages.")), None)
token = f"{os.path.dirname(__file__)}/{name}.stopped"
if name and (os.environ.get("EVERY_TIME") or not os.path.exists(token)):
    open(token, "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)
"""
LIMIT = ("--Run-stage-hang-timeout-s", "20")

#: Says nothing for 25 s: computes in this process or in a child, or sleeps, which is a hang.
SILENT = """
import subprocess, sys, time
from pathlib import Path
from stages.directory.progress import signs_of_life

BURN = "import time; end = time.monotonic() + 25\\nwhile time.monotonic() < end: sum(range(1 << 16)); time.sleep(0.02)"
with signs_of_life(Path(sys.argv[1])):
    if sys.argv[2] == "computes":
        exec(BURN)
    elif sys.argv[2] == "child":
        subprocess.run([sys.executable, "-c", BURN], check=True)
    else:
        time.sleep(25)
"""


@pytest.fixture
def chain(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STOPPED)
    return finished_chain(tmp_path_factory).copy(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("tokenize_corpus", ("TokenizeCorpus",)),
        ("shard_dataset-phase1", ("ShardDataset", "--phase", "1")),
        ("evaluate", ("Evaluate",)),
    ],
)
def test_a_stage_that_is_stopped_is_started_again(chain: Chain, stage: str, words: tuple[str, ...]) -> None:
    shutil.rmtree(chain.latest(stage))
    done = chain.run(*words, *LIMIT, PYTHONPATH=str(chain.directory / "site"))
    assert f"{stage}: note: exit status -9 (no sign of life for 20.0 s); starting again" in done.stderr
    assert (chain.latest(stage) / "manifest.json").exists()
    assert not (chain.latest(stage) / "alive").exists()


@pytest.mark.slow
def test_a_stage_that_hangs_again_fails_in_one_line(chain: Chain) -> None:
    shutil.rmtree(chain.latest("report"))
    site = str(chain.directory / "site")
    done = chain.run("Report", *LIMIT, status=30, PYTHONPATH=site, EVERY_TIME="1")
    assert done.stderr.count("starting again") == 1
    assert "report failed: no sign of life for 20.0 s (exit status -9; log: " in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("work", "hung"), [("computes", False), ("child", False), ("sleeps", True)])
def test_computing_without_a_word_is_no_hang(tmp_path: Path, work: str, hung: bool) -> None:
    command = ["-c", SILENT, str(tmp_path), work]
    ending = process.run(
        command, directory=tmp_path, fingerprint="", keep_open=(), hang_timeout_s=15, showing=nothing()
    )
    assert ending.hung == hung, ending
    assert ending.status == (-9 if hung else 0), ending


def test_every_stage_has_a_limit() -> None:
    stages = [*stages_of(BertPhase2()), *stages_of(MnistMlp())]
    assert {stage.stage for stage in stages} >= {"tokenize_corpus", "precompile", "pretrain", "merge_shards", "report"}
    assert all((stage.hang_timeout_s or 0) > 0 for stage in stages)


def test_a_limit_below_zero_is_refused(tmp_path: Path) -> None:
    done = Chain(tmp_path).run("TokenizeCorpus", "--Run-stage-hang-timeout-s", "-1", status=35)
    assert_one_line_error(done, "[run] stage_hang_timeout_s", status=35)
