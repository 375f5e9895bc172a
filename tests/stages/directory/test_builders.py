"""Several machines make the same bytes as one, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from stages.directory import builders as builders_module
from stages.directory.builders import ALONE, Builders
from stages.directory.manifest import AlreadyComplete, Identity
from stages.examples import plans, shard_writer
from stages.shard import ShardOptions, shard_dataset
from stages.text.corpus import TokenizeOptions
from stages.tokens import encode, parts
from stages.tokens.encode import tokenize_corpus
from tests.helpers.chain import wait_until
from tests.helpers.support import FORKS, ROOT, assert_one_line_error, forked
from tests.stages.tokens.test_tokenize import write_corpus

COUNT = 3


def files(directory: Path) -> dict[str, Any]:
    """Everything that a stage has made; of its manifest, the parts without times."""
    skipped = {"lock", "stage.json", "manifest.json", "alive"}
    found: dict[str, Any] = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in skipped
    }
    manifest = json.loads((directory / "manifest.json").read_text())
    return {**found, "manifest": [manifest[key] for key in ("fingerprint", "outputs", "counts")]}


def tokenize(out: Path, text: Path, builders: Builders) -> None:
    options = TokenizeOptions(sources=(str(text),), vocab_size=300, held_out=0.2)
    with builders.begin(out, options.identity) as work:
        tokenize_corpus(work, options, processes=1, builders=builders)


def shard(out: Path, tokens: Path, builders: Builders, vanished: str = "") -> None:
    """`vanished`: a file of the plan that is listed, but gone when it is looked at."""
    options = ShardOptions(
        tokens=tokens, seq_len=64, max_pred_len=10, shards=7, test_shards=2, masking="dynamic", processes=1
    )
    with builders.begin(out, options.identity) as work:
        if vanished:
            (out / plans.PLAN).mkdir()
            (out / plans.PLAN / vanished).symlink_to("gone")
        shard_dataset(work, options, builders)


def start(made: Any, *arguments: Any) -> BaseProcess:
    """Start `made` in a process of its own, not forked from this one, which has threads."""
    process = FORKS.Process(target=with_small_parts, args=(made, *arguments), daemon=True)
    process.start()
    return process


def with_small_parts(made: Any, *arguments: Any) -> None:
    parts._PART_CHARACTERS, builders_module._LOOK_EVERY_S = 20_000, 0.02
    made(*arguments)


def lost(stage: str, *arguments: Any) -> None:
    """Like `MADE[stage]`, in a process that is killed when it has made one of several files."""
    module, name = (encode, "write_part") if stage == "tokens" else (shard_writer, "contiguous_file")
    whole, written = getattr(module, name), []

    def write(path: Path, *values: Any, **named: Any) -> Any:
        written.append(path)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(path, *values, **named)

    setattr(module, name, write)
    MADE[stage](*arguments)


MADE = {"tokens": tokenize, "shards": shard}


def ended(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode for process in processes]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text", documents=300)


@pytest.fixture
def alone(tmp_path: Path, text: Path) -> tuple[Path, Path]:
    tokens, shards = tmp_path / "tokens-alone", tmp_path / "shards-alone"
    assert ended([start(tokenize, tokens, text, ALONE)]) == [0]
    assert ended([start(shard, shards, tokens, ALONE)]) == [0]
    return tokens, shards


@pytest.mark.slow
def test_three_machines_make_the_bytes_of_one(tmp_path: Path, text: Path, alone: tuple[Path, Path]) -> None:
    """The last machine begins first, and waits."""
    tokens, shards = tmp_path / "tokens", tmp_path / "shards"
    for one, made, source in ((alone[0], tokenize, text), (alone[1], shard, tokens)):
        out = tokens if made is tokenize else shards
        assert ended([start(made, out, source, Builders(rank, COUNT)) for rank in (2, 1, 0)]) == [0, 0, 0]
        assert files(out) == files(one)
    assert len(list(tokens.glob("tokens_training_*"))) > COUNT


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", MADE)
def test_a_lost_machines_files_are_made_again(
    tmp_path: Path, text: Path, alone: tuple[Path, Path], rank: int, stage: str
) -> None:
    """The other machines wait for the one that takes the lost one's place."""
    out, made = tmp_path / "made", MADE[stage]
    source, one = (text, alone[0]) if stage == "tokens" else alone
    others = [start(made, out, source, Builders(other, COUNT)) for other in range(COUNT) if other != rank]
    assert ended([start(lost, stage, out, source, Builders(rank, COUNT))]) == [-signal.SIGKILL]
    assert not (out / "manifest.json").exists()
    assert all(other.is_alive() for other in others)
    assert ended([start(made, out, source, Builders(rank, COUNT)), *others]) == [0, 0, 0]
    assert files(out) == files(one)


@pytest.mark.parametrize("count", [1, COUNT])
def test_what_other_machines_are_writing_stays_when_the_first_starts_again(tmp_path: Path, count: int) -> None:
    out, writing = tmp_path / "made", tmp_path / "made" / "tokens_training_00001.bin.tmp"
    for again in (False, True):
        with Builders(0, count).begin(out, lambda: Identity("tokenize", 1)):
            assert writing.exists() is (again and count > 1)
            writing.touch()


def test_a_file_that_another_machine_renames_meanwhile_is_no_error(tmp_path: Path, alone: tuple[Path, Path]) -> None:
    assert ended([start(shard, tmp_path / "made", alone[0], ALONE, "training_00099.bin.tmp")]) == [0]
    assert files(tmp_path / "made") == files(alone[1])


def test_a_machine_makes_its_own_files_only(tmp_path: Path, text: Path, alone: tuple[Path, Path]) -> None:
    out = tmp_path / "made"
    last = start(tokenize, out, text, Builders(1, 2))
    first = start(tokenize, out, text, Builders(0, 2))
    assert ended([first, last]) == [0, 0]
    number = len(list(out.glob("tokens_training_*")))
    for path in out.glob("tokens_*"):
        path.unlink()
    (out / "manifest.json").unlink()
    first = start(tokenize, out, text, Builders(0, 2))
    try:
        wait_until(lambda: len(list(out.glob("tokens_training_*[02468].hdf5"))) == (number + 1) // 2, timeout_s=60)
        assert not list(out.glob("tokens_training_*[13579].hdf5"))
    finally:
        first.kill()
        first.join()


def test_the_commands_meet_by_the_rank_in_their_environment(tmp_path: Path, text: Path) -> None:
    """And a machine that arrives when everything is done has nothing to do."""
    words = ("--source", text, "--vocab-size", 300, "--builders", 2, "--out", tmp_path / "o")
    command = [sys.executable, "-m", "stages.tokenize", *map(str, words)]

    def run(rank: int) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "PET_NODE_RANK": str(rank)}
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    second, first = run(1), run(0)
    said, _ = first.communicate(timeout=120)
    assert "documents and" in said
    said, errors = second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), errors
    assert "machine 1 of 2 has made its part" in said or "complete already" in errors
    again = run(1)
    assert "complete already" in again.communicate(timeout=120)[1]
    refused = run(2)
    said, errors = refused.communicate(timeout=120)
    ran = subprocess.CompletedProcess(command, refused.returncode, said, errors)
    assert_one_line_error(ran, "this machine's rank is 2; allowed with --builders 2: 0 to 1")


@pytest.mark.parametrize("rank", ["first", "-1", ""])
def test_a_rank_that_is_none_is_one_line(tmp_path: Path, text: Path, rank: str) -> None:
    words = ("--source", text, "--out", tmp_path / "tokens", "--builders", 2)
    refused = forked("stages.tokenize", *words, PET_NODE_RANK=rank)
    assert_one_line_error(refused, f"PET_NODE_RANK is '{rank}'; allowed: the rank of this machine, from 0")
    assert not (tmp_path / "tokens").exists()


def test_what_is_complete_is_not_waited_for(tmp_path: Path, text: Path, alone: tuple[Path, Path]) -> None:
    with pytest.raises(AlreadyComplete):
        tokenize(alone[0], text, Builders(1, 2))
    assert plans.PLAN not in os.listdir(alone[1])
