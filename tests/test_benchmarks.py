"""The benchmarks' own parts: the work that is compared is the same, and what is reported is what was measured."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import xla
from benchmarks.faults import goodput
from benchmarks.faults.schedule import FAULTS
from benchmarks.faults.training import Training
from benchmarks.memory import peak_mb
from benchmarks.processes import ROOT
from benchmarks.quality import Trained, compared
from benchmarks.results import Result, ratio, write_table
from benchmarks.work import A2, Work, half_padding_lengths, packed, pairs_parser, random_rows, write_rows
from common.forked import start_python
from tests.conftest import Disk
from tests.helpers.chain import wait_until
from tests.helpers.support import command, forked, options, start_fork_server, write_dataset, write_model_config
from trainer.data.shards import KEYS
from trainer.data.validation import validate_file

SMALL = A2.but(vocab_size=200, seq_len=64, max_pred_len=10)


def sequences(rows: dict[str, np.ndarray], work: Work) -> list[tuple[object, ...]]:
    """Each sequence's ids, segments, (place, id) of masked tokens and label, sorted."""
    found = []
    for row in range(len(rows["input_ids"])):
        lengths = rows["sequence_lengths"][row] if "sequence_lengths" in rows else [rows["input_mask"][row].sum()]
        labels = np.atleast_1d(rows["next_sentence_labels"][row])
        positions, ids = rows["masked_lm_positions"][row].astype(int), rows["masked_lm_ids"][row]
        start = 0
        for slot, length in enumerate(int(length) for length in lengths if length):
            here = (positions > 0) & (positions >= start) & (positions < start + length)
            masked = sorted(zip((positions[here] - start).tolist(), ids[here].tolist(), strict=True))
            part = slice(start, start + length)
            segments = tuple(rows["segment_ids"][row, part].tolist())
            found.append((tuple(rows["input_ids"][row, part].tolist()), segments, tuple(masked), int(labels[slot])))
            start += length
    return sorted(found)


def test_packed_rows_hold_the_same_sequences(tmp_path: Path) -> None:
    apart = random_rows(SMALL, half_padding_lengths(SMALL, 300))
    together = packed(apart, SMALL)
    assert set(apart) == set(KEYS)
    assert sequences(together, SMALL) == sequences(apart, SMALL)
    assert len(together["input_ids"]) < 0.7 * len(apart["input_ids"])
    for name, rows in (("apart", apart), ("together", together)):
        (path,) = write_rows(tmp_path / name, rows).iterdir()
        assert validate_file(path, seq_len=64, max_pred_len=10, vocab_size=200) == len(rows["input_ids"])


def test_half_of_the_tokens_of_long_rows_are_padding() -> None:
    """0.01 is four standard errors of the mean of 40,000 lengths, whose deviation is about 0.3 of a row."""
    assert half_padding_lengths(A2, 40_000).mean() / 512 == pytest.approx(0.5, abs=0.01)


def test_a_ratio_is_the_median_of_the_pairs() -> None:
    found = ratio("speed", [(30.0, 10.0), (20.0, 10.0), (50.0, 10.0)], ours="a", beside="b", at_least=3.5)
    assert (found.value, found.each, found.met) == (3.0, (3.0, 2.0, 5.0), "no")
    assert Result("time", "", "", 5.9, " s", at_most=6).met == "yes"
    assert Result("time", "", "", 6.1, " s", at_most=6).met == "no"
    assert Result("time", "", "", 6.1, " s").met == ""


@pytest.mark.parametrize("bound", ["at_least", "at_most"])
def test_zero_is_a_bound_and_nan_is_within_none(bound: str) -> None:
    zero: dict[str, Any] = {bound: 0.0}
    met = [Result("loss", "", "", value, " nats more", **zero).met for value in (-0.1, 0.0, 0.1, math.nan)]
    assert met == (["no", "yes", "yes", "no"] if bound == "at_least" else ["yes", "yes", "no", "no"])


@pytest.mark.parametrize(("long_s", "theirs"), [((99.0, 101.0, 98.0), 4.0), ((99.0, 101.0, 102.0), 2.0)])
def test_quality_claims_fail_with_more_time_than_berts_and_against_a_better_trainer(
    long_s: tuple[float, ...], theirs: float
) -> None:
    runs = [(Trained(100, 4.8, 0.35), Trained(5, 3.0, 0.36), Trained(seconds, 3.5, 0.51)) for seconds in long_s]
    found = {one.what: one.met for one in compared("mini", runs, {"tuned": [Trained(75, theirs, 0.2)] * 3})}
    met = "yes" if theirs == 4.0 else "no"
    assert found == {
        "mini: time to BERT's loss": "yes", "mini: loss in that time": "yes", "mini: accuracy in BERT's time": "yes",
        "mini: time of that": met, "mini: loss of Trainer after 15 × our time": met,
    }  # fmt: skip


def test_trainer_decides_when_it_has_done_its_steps() -> None:
    """The clock that ends it after a time leaves its own decision as it is."""
    from transformers import TrainerControl

    from benchmarks.references.hugging_face_mlm import End

    for is_over in (False, True):
        for end in (math.inf, 0.0):
            control = TrainerControl(should_training_stop=is_over)
            End(end).on_step_end(None, None, control)
            assert control.should_training_stop is (is_over or end == 0)


HOLDING = "import time; held = bytearray(b'x') * 100_000_000; time.sleep(1)"


def test_peak_memory_counts_children_and_nothing_twice() -> None:
    """100 MB each in a process and its child at the same time; a bare Python takes 10 MB."""
    program = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {HOLDING!r}]); {HOLDING}"
    assert 200 < peak_mb("-c", f"{program}; child.wait()") < 240


def test_rows_of_a_figure_are_replaced_and_others_stay_unless_of_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "results" / "machine.md"

    def rows() -> list[tuple[str, ...]]:
        lines = [line[2:].split(" | ") for line in table.read_text().splitlines() if line.startswith("| ")]
        return [(line[0], line[1], line[4]) for line in lines[1:]]

    for name, what, value in (("b", "x|y", 1.0), ("a", "x|y", 2.0), ("b", "z", 3.0), ("b", "x|y", 4.0)):
        result = Result(what, "ours", "theirs", value, " ×")
        write_table(table, "a machine", name, [result, result], when="now", others=0.25)
    assert rows() == [("a", "x/y", "2 ×")] * 2 + [("b", "z", "3 ×")] * 2 + [("b", "x/y", "4 ×")] * 2
    monkeypatch.setattr("benchmarks.results.versions", lambda: "newer ones")
    write_table(table, "a machine", "b", [result], when="now", others=0.25)
    assert rows() == [("b", "x/y", "4 ×")]


def test_the_parts_of_a_timed_step_are_there_and_within_it(tmp_path: Path) -> None:
    values = {
        "data_dir": write_dataset(tmp_path / "data", [64], seq_len=32), "output_dir": tmp_path / "out",
        "model_config": write_model_config(tmp_path), "device": "cpu", "batch_size": 4, "grad_accum_usteps": 2,
        "max_steps": 4, "warmup_steps": 1, "precision": "fp32",
    }  # fmt: skip
    done = forked("benchmarks.references.timed", tmp_path / "timed", *options(**values))
    assert done.returncode == 0, done.stdout
    *steps, end = json.loads((tmp_path / "timed" / "0.json").read_text())
    assert len(steps) == 4
    for step in steps:
        wall = step.pop("wall")
        assert step.keys() >= {"forward", "backward", "reduce", "optimizer", "data", "logging"}
        assert all(seconds > 0 for seconds in step.values())
        assert sum(step.values()) <= wall
    assert end["save"] > 0


@pytest.mark.slow
def test_the_gpu_benchmark_runs_small_on_a_cpu(tmp_path: Path) -> None:
    results = {"BENCHMARK_RESULTS": str(tmp_path / "r")}
    done = command("-m", "benchmarks.gpu", "--device", "cpu", "--alone", "--pairs", "1", "--steps", "4", env=results)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert ["phase 1" in found[0]["what"], "phase 2" in found[1]["what"]] == [True, True]
    assert all(one["value"] > 0 and one["at_least"] is None for one in found)


def test_the_gpu_benchmark_is_left_out_without_a_gpu() -> None:
    done = command("-m", "benchmarks.gpu", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "left out: torch sees no GPU" in done.stdout


def test_the_xla_benchmark_is_left_out_without_torch_xla(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["xla"])
    xla.main()
    assert capsys.readouterr().out == "left out: torch-xla is not installed\n"


@pytest.mark.parametrize(("option", "least"), [("steps", 4), ("pairs", 1)])
def test_steps_that_are_all_warm_up_and_no_pairs_are_refused(
    option: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vars(pairs_parser(None).parse_args([f"--{option}", str(least)]))[option] == least
    with pytest.raises(SystemExit):
        pairs_parser(None).parse_args([f"--{option}", str(least - 1)])
    assert f"--{option}: {least - 1} is too few" in capsys.readouterr().err


#: Leaves two orphans, and ends with the first, which computes for 0.3 s.
ORPHANS = """
import os, time
reader, writer = os.pipe()
for is_short in (False, True):
    if os.fork() == 0:
        if os.fork() == 0:
            if is_short:
                while time.process_time() < 0.3:
                    pass
                os._exit(0)
            os.close(writer)
            time.sleep(60)
        os._exit(0)
os.close(writer)
os.read(reader, 1)
"""
#: Runs that as `python -m benchmarks` does; prints the status, the processor time of all children, and those left.
RUN = """
import os, psutil, resource, sys
from pathlib import Path
from benchmarks.__main__ import adopt_orphans, run
adopt_orphans()
status = run("-c", sys.argv[1], results=Path(os.devnull))
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(status, used.ru_utime + used.ru_stime, len(psutil.Process().children()))
"""


def test_orphans_are_ended_and_their_time_is_known() -> None:
    began = time.monotonic()
    done = command("-c", RUN, ORPHANS)
    status, seconds, left = done.stdout.split()
    assert (status, left) == ("0", "0"), done.stderr
    assert float(seconds) >= 0.3
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("words", "signum"),
    [(("benchmarks.faults.recovery",), signal.SIGTERM), (("benchmarks", "faults.recovery"), signal.SIGINT)],
)
def test_a_signal_ends_all_that_a_benchmark_has_started(
    tmp_path: Path, words: tuple[str, ...], signum: signal.Signals
) -> None:
    def started() -> list[psutil.Process]:
        """What runs with this folder for its temporary files."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found += [process] if process.environ().get("TMPDIR") == str(tmp_path) else []
        return found

    start_fork_server()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with open(os.devnull, "wb") as output:
        process = start_python(["-m", *words], environment=environment, output=output.fileno(), directory=ROOT)
    wait_until(lambda: any(tmp_path.glob("*/luigi.log")))
    assert started()
    os.kill(process.pid, signum)
    assert process.wait() == 128 + signum
    assert (started(), list(tmp_path.iterdir())) == ([], [])


def test_many_shards_are_pushed_and_listed_in_few_requests(tmp_path: Path) -> None:
    results = {"BENCHMARK_RESULTS": str(tmp_path / "r")}
    done = command("-m", "benchmarks.faults.store_shards", "--shards", "150", "--kilobytes", "1", env=results)
    assert done.returncode == 0, done.stderr
    push, again, listing = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert 150 < push["value"] <= push["at_most"]
    assert max(again["value"], listing["value"]) < 10


def test_an_unknown_benchmark_is_refused() -> None:
    done = command("-m", "benchmarks", "speed")
    assert done.returncode == 2
    assert "speed" in done.stderr
    assert "train_cpu" in done.stderr


class Sleeper(Training):
    """One process that does nothing."""

    def __init__(self, disk: Path) -> None:
        super().__init__(["-c", "import time; time.sleep(60)"], {}, disk.parent / "log", lambda tail: [], disk)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Sleeper]:
    (tmp_path / "work").mkdir()
    found = Sleeper(tmp_path / "work")
    found.keep_running()
    yield found
    found.end()


def test_faults_befall_a_training_and_end(training: Sleeper) -> None:
    rng = random.Random(0)
    (process,) = training.processes()
    undo = FAULTS["stop"](training, rng)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    undo()
    wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
    FAULTS["kill"](training, rng)()
    wait_until(lambda: training.has_ended)
    for fault, is_left in (("lost-machine", True), ("lost-disk", False)):
        training.keep_running()
        FAULTS[fault](training, rng)()
        assert training.has_ended
        assert training.disk.exists() is is_left


def test_a_side_without_steps_is_given_up(training: Sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "NO_STEP_S", 0.2)
    with pytest.raises(goodput.CannotTrain, match=r"no step in 0\.2 s"):
        goodput.goodput(training, [], seconds=60, period=0.1, seed=0)
    assert training.has_ended


def test_what_some_sides_reached_is_said_though_others_cannot_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(training: Training, *args: object, **kwargs: object) -> tuple[float, int, int]:
        if training.disk.name == "theirs":
            raise goodput.CannotTrain("no step")
        return 0.93, 100, 5

    monkeypatch.setattr(goodput, "goodput", measured)
    monkeypatch.setattr(goodput, "is_installed", lambda side: side != "torchft")
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "r"))
    monkeypatch.setattr(sys, "argv", ["goodput", "--workers=1", "--sides", "trainer", "torchft", "ours"])
    with pytest.raises(SystemExit, match="error: Trainer under torchrun: no step"):
        goodput.main()
    assert "torchft: left out" in capsys.readouterr().out
    assert json.loads((tmp_path / "r").read_text())["value"] == 93


def test_workers_that_do_not_divide_a_step_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["goodput", "--workers=3"])
    with pytest.raises(SystemExit):
        goodput.main()
    assert "error: --workers is 3" in capsys.readouterr().err


def test_a_disk_is_full_for_a_while(disk: Disk) -> None:
    (disk.path / "work").mkdir()
    undo = FAULTS["full-disk"](Sleeper(disk.path / "work"), random.Random(0))
    with pytest.raises(OSError, match="No space left"):
        (disk.path / "work" / "checkpoint").write_bytes(bytes(1 << 20))
    undo()
    (disk.path / "work" / "checkpoint").write_bytes(bytes(1 << 20))
