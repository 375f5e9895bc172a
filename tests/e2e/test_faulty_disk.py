"""An I/O error at the n-th write or fsync, for every n: nothing durable is lost, and a rerun resumes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.files import sweep_temporaries
from tests.e2e.test_failpoints import TRAINING, outputs
from tests.helpers.chain import write_corpus
from tests.helpers.support import (
    ROOT,
    assert_one_line_error,
    assert_same_bytes,
    assert_workers_error,
    command,
    fork_server,
    forked,
    train,
    write_dataset,
    write_model_config,
)
from tests.helpers.web import serving
from trainer.checkpoint.directory import why_invalid
from trainer.data.identity import CACHE


@pytest.fixture(scope="module", autouse=True)
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compiled tests/helpers/faulty/io.c, preloaded into every process that is forked for these tests."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build tests/helpers/faulty/io.c with")
    library = tmp_path_factory.mktemp("shim") / "faulty_io.so"
    source = ROOT / "tests" / "helpers" / "faulty" / "io.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    with pytest.MonkeyPatch.context() as patch, fork_server(LD_PRELOAD=str(library)):
        patch.setenv("LD_PRELOAD", str(library))
        yield


def faulty(prefix: Path, n: int) -> dict[str, str]:
    return {"FAULTY_PREFIX": str(prefix), "FAULTY_N": str(n)}


def test_the_shim_reaches_real_writes(tmp_path: Path) -> None:
    program = f"import os; os.write(os.open({str(tmp_path / 'x')!r}, os.O_CREAT | os.O_WRONLY), b'x')"
    assert "Input/output error" in command("-c", program, env=faulty(tmp_path, 1)).stderr
    assert command("-c", program, env=faulty(tmp_path, 2)).returncode == 0
    (tmp_path / "y").write_text("y")
    for number, error in (("5", "Input/output error"), ("13", "Permission denied")):
        env = {"FAULTY_UNREADABLE": str(tmp_path / "y"), "FAULTY_ERRNO": number}
        assert error in command("-c", f"open({str(tmp_path / 'y')!r}).read()", env=env).stderr


REPLACING = """
import sys
from pathlib import Path
from common.files import rename_durably
rename_durably(*map(Path, sys.argv[1:]))
"""


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_directory_is_replaced_without_a_moment_in_which_there_is_none(tmp_path: Path, exchanges: bool) -> None:
    """Killed at each point. Where names cannot be exchanged, the sweep puts the old directory back."""
    env = {} if exchanges else {"FAULTY_EXCHANGE": "1"}
    log = tmp_path / "points"
    final, temporary = tmp_path / "at" / "final", tmp_path / "at" / "final.tmp"

    def prepared() -> None:
        shutil.rmtree(tmp_path / "at", ignore_errors=True)
        for directory, content in ((final, "old"), (temporary, "new")):
            directory.mkdir(parents=True)
            (directory / "content").write_text(content)

    prepared()
    straight = {**env, "FAILPOINT": "none", "FAILPOINT_LOG": str(log)}
    assert command("-c", REPLACING, str(temporary), str(final), env=straight).returncode == 0
    assert [path.name for path in (tmp_path / "at").iterdir()] == ["final"]
    points = log.read_text().split()
    assert len(points) == (2 if exchanges else 4)
    for point in points:
        prepared()
        done = command("-c", REPLACING, str(temporary), str(final), env={**env, "FAILPOINT": point})
        assert done.returncode == -signal.SIGKILL
        if not exchanges:
            sweep_temporaries(tmp_path / "at")
        expected = "old" if point in ("rename-before:final", "rename-between:final") else "new"
        assert (final / "content").read_text() == expected, point
        sweep_temporaries(tmp_path / "at")
        assert [path.name for path in (tmp_path / "at").iterdir()] == ["final"]


@pytest.mark.parametrize(
    ("error", "workers", "split", "rank"), [(5, 1, 1, 0), (13, 1, 1, 0), (5, 2, 1, 1), (13, 2, 2, 0), (5, 2, 2, 1)]
)
def test_a_checkpoint_that_cannot_be_read_is_passed_over_by_all(
    tmp_path: Path, error: int, workers: int, split: int, rank: int
) -> None:
    """EIO and EACCES, whichever worker meets them: all resume from the checkpoint before, to the same bytes."""
    data, model = write_dataset(tmp_path / "data", [21]), write_model_config(tmp_path)
    values = {**TRAINING, "data_dir": data, "model_config": model, "grad_accum_usteps": 1, "max_steps": 3,
              "ckpt_interval_steps": 1, "num_ckpts_to_keep": -1, "tensor_parallel_size": split}  # fmt: skip
    assert train(workers, output_dir=tmp_path / "straight", **values).returncode == 0
    out = tmp_path / "out"
    assert train(workers, output_dir=out, **values, steps_this_run=2).returncode == 0
    newest = out / "checkpoints" / "ckpt_2"
    files = {path.name for path in newest.glob("*.safetensors") if split == 1 or f"-{rank:02}-of-" in path.name}
    assert len(files) == 2
    for name in files:
        again = Path(shutil.copytree(out, tmp_path / f"again-{name}"))
        env = {"FAULTY_UNREADABLE": str(again / "checkpoints" / "ckpt_2" / name), "FAULTY_RANK": str(rank)}
        done = train(workers, env={**env, "FAULTY_ERRNO": str(error)}, output_dir=again, **values)
        assert done.returncode == 0, done.stdout
        reason = f"{name} cannot be read: {os.strerror(error)}"
        assert [line for line in done.stdout.splitlines() if "skipping" in line and reason in line], done.stdout
        assert "resuming from" in done.stdout
        assert "ckpt_1 at step 1" in done.stdout
        assert_same_bytes(again / "checkpoints" / "ckpt_3", tmp_path / "straight" / "checkpoints" / "ckpt_3")


@pytest.mark.parametrize("workers", [1, 2])
def test_training_does_not_begin_anew_because_its_only_checkpoint_cannot_be_read(tmp_path: Path, workers: int) -> None:
    data, model = write_dataset(tmp_path / "data", [21]), write_model_config(tmp_path)
    values = {**TRAINING, "data_dir": data, "model_config": model, "grad_accum_usteps": 1, "num_ckpts_to_keep": 1}
    out = tmp_path / "out"
    assert train(workers, output_dir=out, **values, steps_this_run=2).returncode == 0
    env = {"FAULTY_UNREADABLE": str(out / "checkpoints" / "ckpt_2"), "FAULTY_ERRNO": "13"}
    done = train(workers, env=env, output_dir=out, **values)
    assert_workers_error(done, 0, "ckpt_2 cannot be read now", "put that right", size=workers)
    assert why_invalid(out / "checkpoints" / "ckpt_2") is None


def fail_everywhere(module: str, words: tuple[object, ...], tmp_path: Path, *, least: int) -> None:
    """Run `python -m module words… --out DIR` with an error at each of its writes, of which there are more than
    `least`, and each time once more without an error."""
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


@pytest.mark.slow
def test_shard_at_every_write(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    made = ("--vocab-size", 300, "--held-out", 0.1, "--processes", 1)
    done = forked("stages.tokenize", "--source", tmp_path / "corpus.txt", *made, "--out", tmp_path / "tokens")
    assert done.returncode == 0, done.stdout
    words = ("--tokens", tmp_path / "tokens", "--seq-len", 32, "--max-pred-len", 5, "--shards", 2, "--processes", 1)
    fail_everywhere("stages.shard", words, tmp_path, least=15)


@pytest.mark.slow
def test_download_at_every_write(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", [9, 5])
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "tar", data))
    with serving(archive.read_bytes()) as web:
        words = (web.url, "--processes", 1, "--connections", 1)
        fail_everywhere("stages.download", words, tmp_path, least=25)


#: (ranks that share the model, the one whose disk fails, writes from one failure to the next, least number of failures)
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("size", "rank", "apart", "least"), [(1, 0, 1, 20), (2, 0, 17, 2), (2, 1, 8, 2)])
def test_training_at_every_write(tmp_path: Path, size: int, rank: int, apart: int, least: int) -> None:
    """A few of the writes are TensorBoard's and progress.json's: errors in those end the run in the same way. With two
    ranks only some of the writes fail, to save time."""
    data, model = write_dataset(tmp_path / "data", [21]), write_model_config(tmp_path, num_hidden_layers=1)
    values = {**TRAINING, "data_dir": data, "model_config": model, "grad_accum_usteps": 1, "max_steps": 2,
              "ckpt_interval_steps": 1, "tensor_parallel_size": size}  # fmt: skip
    assert train(size, output_dir=tmp_path / "straight", **values).returncode == 0
    failures, resumed, said = 0, False, tmp_path / "failed"
    while True:
        n = 1 + failures * apart
        out = tmp_path / "out"
        env = {**faulty(out, n), "FAULTY_RANK": str(rank), "FAULTY_SAID": str(said)}
        done = train(size, env=env, output_dir=out, **values)
        if not said.exists():
            break
        failures += 1
        if CACHE in said.read_text():  # only the time that hashing takes would be lost
            assert done.returncode == 0, done.stdout
        else:
            assert_workers_error(done, rank, "cannot write", str(out), "Input/output error", size=size)
        said.unlink()
        kept = sorted((out / "checkpoints").glob("ckpt_?"))
        assert all(why_invalid(checkpoint) is None for checkpoint in kept)
        again = train(size, output_dir=out, **values)
        assert again.returncode == 0, again.stdout
        assert ("with initial weights" in again.stdout) == (not kept), (n, again.stdout)
        resumed |= bool(kept)
        assert_same_bytes(out / "checkpoints" / "ckpt_2", tmp_path / "straight" / "checkpoints" / "ckpt_2", why=n)
        shutil.rmtree(out)
    assert failures >= least
    assert resumed
