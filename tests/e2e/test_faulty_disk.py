"""An I/O error at the n-th write or fsync, for every n: nothing durable is lost, and a rerun goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.chain import write_corpus
from tests.e2e.test_failpoints import TRAINING, outputs
from tests.stages.web import serving
from tests.support import (
    ROOT,
    assert_one_line_error,
    assert_same_bytes,
    assert_workers_error,
    command,
    forked,
    train,
    write_dataset,
    write_model_config,
)
from trainer.checkpoint.directory import why_invalid


@pytest.fixture(scope="module", autouse=True)
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compiled tests/faulty_io.c, preloaded into every process that is forked for these tests."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build tests/faulty_io.c with")
    library = tmp_path_factory.mktemp("shim") / "faulty_io.so"
    source = ROOT / "tests" / "faulty_io.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        forkserver._forkserver._stop()  # the next process starts a new one, with the library
        yield
    forkserver._forkserver._stop()


def faulty(prefix: Path, n: int) -> dict[str, str]:
    return {"FAULTY_PREFIX": str(prefix), "FAULTY_N": str(n)}


def test_the_shim_reaches_real_writes(tmp_path: Path) -> None:
    program = f"import os; os.write(os.open({str(tmp_path / 'x')!r}, os.O_CREAT | os.O_WRONLY), b'x')"
    assert "Input/output error" in command("-c", program, env=faulty(tmp_path, 1)).stderr
    assert command("-c", program, env=faulty(tmp_path, 2)).returncode == 0


def fail_everywhere(module: str, words: tuple[object, ...], tmp_path: Path, *, least: int) -> None:
    """Run `python -m module words… --out DIR` with an error at each of its writes, of which there are more than
    `least`, and once more without."""
    straight = tmp_path / "straight"
    assert forked(module, *words, "--out", straight).returncode == 0
    n = 0
    while True:
        n += 1
        out = tmp_path / f"out-{n}"
        done = forked(module, *words, "--out", out, **faulty(out, n))
        if done.returncode == 0:
            break
        assert_one_line_error(done, "cannot write", str(out), "Input/output error")
        assert forked(module, *words, "--out", out).returncode == 0
        assert outputs(out) == outputs(straight), n
        assert not (out / "archive").exists()
    assert n > least


def test_shard_at_every_write(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    made = ("--vocab-size", 300, "--held-out", 0.1, "--processes", 1)
    done = forked("stages.tokenize", "--source", tmp_path / "corpus.txt", *made, "--out", tmp_path / "tokens")
    assert done.returncode == 0, done.stdout
    words = ("--tokens", tmp_path / "tokens", "--seq-len", 32, "--max-pred-len", 5, "--shards", 2, "--processes", 1)
    fail_everywhere("stages.shard", words, tmp_path, least=15)


def test_download_at_every_write(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", [9, 5])
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "tar", data))
    with serving(archive.read_bytes()) as web:
        words = (web.url, "--processes", 1, "--connections", 1)
        fail_everywhere("stages.download", words, tmp_path, least=25)


#: (ranks that share the model, the one whose disk fails, writes from one failure to the next, failures at least)
@pytest.mark.parametrize(("size", "rank", "apart", "least"), [(1, 0, 1, 20), (2, 0, 13, 2), (2, 1, 7, 2)])
def test_training_at_every_write(tmp_path: Path, size: int, rank: int, apart: int, least: int) -> None:
    """A few of its writes are TensorBoard's and progress.json's: those end the run in the same way. With two ranks
    only some of the writes fail, for time's sake."""
    data, model = write_dataset(tmp_path / "data", [21]), write_model_config(tmp_path)
    values = {**TRAINING, "data_dir": data, "model_config": model, "grad_accum_usteps": 1, "max_steps": 2,
              "ckpt_interval_steps": 1, "tensor_parallel_size": size}  # fmt: skip
    assert train(size, output_dir=tmp_path / "straight", **values).returncode == 0
    failures = 0
    while True:
        n = 1 + failures * apart
        out = tmp_path / "out"
        done = train(size, env={**faulty(out, n), "FAULTY_RANK": str(rank)}, output_dir=out, **values)
        if done.returncode == 0:
            break
        failures += 1
        assert_workers_error(done, rank, "cannot write", str(out), "Input/output error", size=size)
        kept = sorted((out / "checkpoints").glob("ckpt_?"))
        assert all(why_invalid(checkpoint) is None for checkpoint in kept)
        assert train(size, output_dir=out, **values).returncode == 0
        assert_same_bytes(out / "checkpoints" / "ckpt_2", tmp_path / "straight" / "checkpoints" / "ckpt_2", why=n)
        shutil.rmtree(out)
    assert failures >= least
