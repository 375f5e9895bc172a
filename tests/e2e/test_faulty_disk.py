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
    command,
    forked,
    tensors,
    train,
    write_dataset,
    write_model_config,
)
from trainer.checkpoint.format import why_invalid


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


def test_shard_at_every_write(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    made = ("--vocab-size", 300, "--held-out", 0.1, "--processes", 1)
    done = forked("stages.tokenize", "--source", tmp_path / "corpus.txt", *made, "--out", tmp_path / "tokens")
    assert done.returncode == 0, done.stdout
    words = ("--tokens", tmp_path / "tokens", "--seq-len", 32, "--max-pred-len", 5, "--shards", 2, "--processes", 1)
    straight = tmp_path / "straight"
    assert forked("stages.shard", *words, "--out", straight).returncode == 0
    n = 0
    while True:
        n += 1
        out = tmp_path / f"out-{n}"
        done = forked("stages.shard", *words, "--out", out, **faulty(out, n))
        if done.returncode == 0:
            break
        assert_one_line_error(done, "cannot write", str(out), "Input/output error")
        assert forked("stages.shard", *words, "--out", out).returncode == 0
        assert outputs(out) == outputs(straight), n
    assert n > 15


def test_download_at_every_write(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", [9, 5])
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "tar", data))
    straight = tmp_path / "straight"
    with serving(archive.read_bytes()) as web:
        words = (web.url, "--processes", 1, "--connections", 1)
        assert forked("stages.download", *words, "--out", straight).returncode == 0
        n = 0
        while True:
            n += 1
            out = tmp_path / f"out-{n}"
            done = forked("stages.download", *words, "--out", out, **faulty(out, n))
            if done.returncode == 0:
                break
            assert_one_line_error(done, "cannot write", str(out), "Input/output error")
            assert forked("stages.download", *words, "--out", out).returncode == 0
            assert outputs(out) == outputs(straight), n
            assert not (out / "archive").exists()
    assert n > 25


def test_training_at_every_write(tmp_path: Path) -> None:
    """A few of its writes are TensorBoard's and progress.json's: those end the run in the same way."""
    data, model = write_dataset(tmp_path / "data", [21]), write_model_config(tmp_path)
    values = {**TRAINING, "data_dir": data, "model_config": model, "grad_accum_usteps": 1, "max_steps": 2,
              "ckpt_interval_steps": 1}  # fmt: skip
    assert train(output_dir=tmp_path / "straight", **values).returncode == 0
    wanted = tensors(tmp_path / "straight" / "checkpoints" / "ckpt_2")
    n = 0
    while True:
        n += 1
        out = tmp_path / "out"
        done = train(env=faulty(out, n), output_dir=out, **values)
        if done.returncode == 0:
            break
        assert_one_line_error(done, "cannot write", str(out), "Input/output error")
        kept = sorted((out / "checkpoints").glob("ckpt_?"))
        assert all(why_invalid(checkpoint) is None for checkpoint in kept)
        assert train(output_dir=out, **values).returncode == 0
        got = tensors(out / "checkpoints" / "ckpt_2")
        assert all(got[name].tobytes() == tensor.tobytes() for name, tensor in wanted.items()), n
        shutil.rmtree(out)
    assert n > 20
