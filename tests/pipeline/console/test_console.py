"""What a run shows: on a real terminal, whose screen pyte emulates; in a pipe; to a program."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyte
import pytest

from common.process import available_cores
from pipeline import header
from pipeline.console.events import Events
from pipeline.settings.cluster import Cluster
from tests.helpers.chain import Chain, start_luigi, wait_until, write_corpus
from tests.helpers.support import ROOT
from tests.pipeline.console.terminal import in_terminal

SHARDS = ("ShardDataset", "--phase", "1")
STAGES = ("tokenize_corpus", "shard_dataset-phase1")
ESCAPE = b"\x1b"
COLOUR = re.compile(rb"\x1b\[[\d;]*3[1-7]m")


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def screens_of(words: list[str], env: dict[str, str], columns: int = 110) -> tuple[list[list[str]], bytes, int]:
    """Run a command in a terminal; returns (its screens after each write, all bytes, exit status)."""
    screens, written = list[list[str]](), list[bytes]()

    def look(screen: pyte.Screen, some: bytes) -> None:
        screens.append([line.rstrip() for line in screen.display if line.strip()])
        written.append(some)

    status = in_terminal(words, env, look, columns=columns, rows=30, cwd=ROOT)
    return screens, b"".join(written), status


def luigi(chain: Chain, *words: str, columns: int = 110, **env: str) -> tuple[list[list[str]], bytes, int]:
    command = [sys.executable, "-m", "luigi", "--module", "pipeline", *words]
    return screens_of(command, {"LUIGI_CONFIG_PATH": str(chain.config), **env}, columns)


def test_a_terminal_has_a_header_and_a_line_for_each_stage(chain: Chain) -> None:
    write_corpus(chain.directory / "corpus.txt", 4000)  # long enough for a live line
    screens, _, status = luigi(chain, *SHARDS, columns=200)
    header, *lines = screens[-1]
    assert status == 0, screens[-1]
    assert header.startswith(f"ShardDataset: 2 of 2 stages to make in {chain.work}"[:60])
    complete = [line for line in lines if not re.match(r"tokenize_corpus: note: ", line)]
    assert [line.split()[:2] for line in complete] == [["✓", stage] for stage in STAGES]
    assert re.search(r" \d:\d\d  [\d,]+ documents and [\d,]+ held out, [\d,]+ tokens$", complete[0])
    live = [line for screen in screens for line in screen if re.match(r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] tokenize_corpus", line)]
    assert any(re.search(r"━.* \d+% [\d.]+ [kM]?B/[\d.]+ MB", line) for line in live), live[-3:]


def test_a_task_that_depends_on_nothing_has_a_header_too(chain: Chain) -> None:
    first, *others = chain.run("TokenizeCorpus").stderr.splitlines()
    assert first.startswith(f"TokenizeCorpus: 1 of 1 stages to make in {chain.work}, device cpu, ")
    assert not any("stages to make" in line for line in others)


def test_the_header_names_the_device_that_auto_is(chain: Chain, tmp_path: Path) -> None:
    """A machine without a GPU, and one whose nvidia-smi, a stand-in, lists two."""
    said = [chain.run("TokenizeCorpus", "--Cluster-device", "auto", PATH=os.environ["PATH"]).stderr]
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559'\necho 'NVIDIA H100, 81559'\n")
    script.chmod(0o755)
    words = ("--Cluster-device", "auto", "--Corpus-vocab-size", "301")
    said.append(chain.run("TokenizeCorpus", *words, PATH=f"{tmp_path}:{os.environ['PATH']}").stderr)
    assert "device auto: the CPU" in said[0] or shutil.which("nvidia-smi") or shutil.which("neuron-ls")
    assert "device auto: 2 × NVIDIA H100, " in said[1]


def test_a_stop_while_the_header_is_made_stops_the_run(chain: Chain, tmp_path: Path) -> None:
    """luigi drops a KeyboardInterrupt of what it calls at a task's start."""
    script, marker = tmp_path / "nvidia-smi", tmp_path / "asked"
    script.write_text(f"#!/bin/sh\ntouch {marker}\nsleep 3\n")
    script.chmod(0o755)
    words = ("TokenizeCorpus", "--Cluster-device", "auto", "--Corpus-vocab-size", "302")
    luigi = chain.start(*words, PATH=f"{tmp_path}:{os.environ['PATH']}")
    wait_until(marker.exists, every_s=0.05)
    luigi.send_signal(signal.SIGINT)
    assert luigi.wait(timeout=120) == 75
    said = (chain.directory / "luigi.log").read_text()
    assert said == "interrupted; the same command continues\n"


def test_the_header_has_the_nodes_of_a_scheduler_not_the_cores_here() -> None:
    clusters = (SimpleNamespace(launcher=name, nnodes=2, nproc_per_node=8) for name in ("slurm", "local"))
    wanted = ["2 nodes × 8 workers", f"{available_cores()} cores"]
    assert [header._workers(cast(Cluster, cluster)) for cluster in clusters] == wanted


@pytest.mark.slow
def test_the_header_tells_how_long_it_takes_once_stages_were_made(chain: Chain) -> None:
    write_corpus(chain.directory / "corpus.txt", 20_000)
    first = chain.run(*SHARDS).stderr.splitlines()[0]
    made = [chain.manifest(stage)["seconds"] for stage in STAGES]
    second = chain.run(*SHARDS, "--Corpus-held-out", "0.2").stderr.splitlines()[0]
    assert first.endswith("cores, time not known yet")
    told = re.search(r" cores, about (\d+\.?\d*) s$", second)
    assert told, second
    # The corpus is as large as before, but a fifth fewer documents are left for the shards.
    assert float(told[1]) == pytest.approx(sum(map(float, made)), rel=0.25, abs=1)  # type: ignore[arg-type]


def test_the_stage_log_has_every_line_and_the_command(chain: Chain) -> None:
    luigi(chain, *SHARDS)
    (log,) = chain.work.glob("tokenize_corpus-*/stage.log")
    command, *lines = log.read_text().splitlines()
    assert command.startswith("$ python -m stages.tokenize --")
    assert f" --source={chain.directory / 'corpus.txt'} " in command
    assert any(" documents and " in line for line in lines)
    assert not any("%|" in line and "100%" not in line for line in lines), "a progress bar on its way"


def test_no_color_leaves_the_colours_out(chain: Chain) -> None:
    _, plain, _ = luigi(chain, *SHARDS, NO_COLOR="1")
    _, coloured, _ = luigi(chain, *SHARDS, "--Run-seed", "7")
    assert not COLOUR.search(plain)
    assert COLOUR.search(coloured)
    # Only the mark is green.
    assert re.search("\x1b\\[32m✓ \x1b\\[0m".encode(), coloured)
    assert re.search(rb"\x1b\[0m[\d,]+ documents and", coloured)


def test_a_live_line_keeps_its_parts_apart(tmp_path: Path) -> None:
    """With a progress file such as a training writes."""
    progress = {"done": 420, "total": 2000, "per_s": 8.5, "unit": "steps", "label": "phase 1, loss 4.303"}
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    program = (
        "import pathlib, time\n"
        "from pipeline.console.select import choose_once, console\n"
        "choose_once('live')\n"
        f"with console().running('pretrain-phase1', pathlib.Path({str(tmp_path)!r})):\n"
        "    time.sleep(3)\n"
    )
    screens, _, _ = screens_of([sys.executable, "-c", program], {}, columns=130)
    expected = re.compile(r" 21% 420/2,000 steps, 8\.50*/s, 3:06 left  phase 1, loss 4\.303$")
    assert any(expected.search(line) for one in screens for line in one), screens[:1]


def test_a_dumb_terminal_and_a_pipe_have_plain_lines(chain: Chain) -> None:
    _, written, _ = luigi(chain, *SHARDS, TERM="dumb")
    said = chain.run(*SHARDS, "--Run-seed", "7").stderr
    for text in (written.decode().replace("\r\n", "\n"), said):
        assert "\x1b" not in text
        for stage in STAGES:
            assert f"{stage}: started in {chain.work}" in text
            assert re.search(rf"^{stage}: complete \(\d+:\d\d\)$", text, re.MULTILINE)
        assert "$ python" not in text


def test_stages_of_two_workers_share_a_terminal_without_live_lines(chain: Chain) -> None:
    screens, _, status = luigi(chain, *SHARDS, "--workers", "2", columns=200)
    assert status == 0
    for stage in STAGES:
        assert any(line.startswith(f"{stage}: complete") for line in screens[-1])


def test_a_narrow_terminal_wraps_nothing(chain: Chain) -> None:
    """A live line that wrapped would leave its upper half behind at each redraw."""
    write_corpus(chain.directory / "corpus.txt", 2000)
    screens, _, status = luigi(chain, *SHARDS, columns=60)
    assert status == 0
    assert [line[:2] for line in screens[-1]].count("✓ ") == 2
    assert not any(line.startswith("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[n]) for line in screens[-1] for n in range(10))


@pytest.mark.parametrize("words", [["--quiet"], ["--Run-console", "quiet"]])
def test_quiet_shows_only_what_needs_attention(chain: Chain, words: list[str]) -> None:
    done = chain.run(*SHARDS, *words)
    assert (done.stdout, done.stderr) == ("", "note: this text gives a vocabulary of only 107 pieces\n")
    assert all((chain.latest(stage) / "manifest.json").exists() for stage in STAGES)
    (chain.directory / "corpus.txt").write_bytes(b"\xff not UTF-8")
    failed = chain.run(*SHARDS, *words, status=30)
    assert "is not UTF-8" in failed.stderr
    assert "started in" not in failed.stderr


def test_json_lines_tell_a_program_what_happens(chain: Chain) -> None:
    done = chain.run(*SHARDS, "--Run-console", "json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(event) >= {"event", "time"} for event in events)
    assert [event["stage"] for event in events if event["event"] == "started"] == list(STAGES)
    complete = [event for event in events if event["event"] == "complete"]
    assert [event["stage"] for event in complete] == list(STAGES)
    for event in complete:
        (directory,) = (
            one["directory"] for one in events if one["event"] == "started" and one["stage"] == event["stage"]
        )
        recorded = json.loads((Path(directory) / "manifest.json").read_text())["seconds"]
        assert event["seconds"] == pytest.approx(recorded, abs=2)
    assert events[0]["event"] == "header"


def test_json_lines_tell_a_program_why_a_run_ended(chain: Chain) -> None:
    """The command refuses its text. Another console shows what luigi says."""
    (chain.directory / "corpus.txt").write_bytes(b"\xff not UTF-8")
    done = chain.run(*SHARDS, "--Run-console", "json", status=30)
    (failed,) = (one for one in map(json.loads, done.stdout.splitlines()) if one["event"] == "failed")
    assert (failed["stage"], failed["status"]) == ("tokenize_corpus", 1)
    assert "is not UTF-8" in failed["error"]
    assert "is not UTF-8" in chain.run(*SHARDS, "--Run-console", "plain", status=30).stderr


def test_a_monitor_that_dies_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`luigi … --Run-console json | monitor`: an error here would kill the stage before it has saved."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        console = Events()
        with console.running("pretrain-phase1", tmp_path) as said:
            for step in range(2):
                said(f"step {step}", False)
        console.complete("pretrain-phase1", 1.0, "")


def test_warnings_of_a_stage_are_shown_above_its_live_line(tmp_path: Path) -> None:
    """With a program of our own, as no short stage gives warnings."""
    program = (
        "import pathlib, time\n"
        "from common.console import log\n"
        "from pipeline.console.select import choose_once, console\n"
        "choose_once('live')\n"
        f"with console().running('pretrain-phase1', pathlib.Path({str(tmp_path)!r})) as said:\n"
        "    for line in ('LOG a step', 'warning: the rate is too high', 'note: a batch is skipped'):\n"
        "        said(line, False)\n"
        "    log('a line of luigi')\n"
        "    time.sleep(0.6)\n"
    )
    screens, _, status = screens_of([sys.executable, "-c", program], {})
    assert status == 0
    expected = [
        "pretrain-phase1: warning: the rate is too high", "pretrain-phase1: note: a batch is skipped",
        "a line of luigi",
    ]  # fmt: skip
    assert screens[-1] == expected
    (live,) = {line[2:17] for screen in screens for line in screen if line not in expected and line[2:3].isalpha()}
    assert live == "pretrain-phase1"


@pytest.mark.slow
def test_no_dump_of_settings_and_no_warning_of_a_library_is_shown(chain: Chain) -> None:
    said = chain.run("BertPhase2", "--Cluster-nproc-per-node", "2").stderr
    assert "BERT is pretrained.\n" in said
    for line in ("TrainConfig(", "[Gloo]", "WARNING:root", "Warning"):
        assert line not in said
    assert "--max_steps" in (chain.latest("pretrain-phase1") / "stage.log").read_text()


def test_a_closed_terminal_does_not_end_a_run(chain: Chain) -> None:
    """The stage goes on as if there were none (tests/e2e/test_signals.py tests SIGHUP, which ends a training)."""
    ours, theirs = pty.openpty()
    process = start_luigi(chain.config, *SHARDS, stdout=theirs, stderr=theirs, stdin=theirs, TERM="xterm-256color")
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    assert process.wait(timeout=120) == 0
    assert all((chain.latest(stage) / "manifest.json").exists() for stage in STAGES)
