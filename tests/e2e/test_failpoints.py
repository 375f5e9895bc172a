"""Killed before and after every write, rename and link, once each: the same command then finishes, with the bytes of
an uninterrupted run.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.chain import LUIGI, Chain, finished_chain, write_corpus
from tests.helpers.support import (
    command,
    forked,
    losses,
    tensors,
    train,
    write_dataset,
    write_model_config,
)
from tests.helpers.web import serving
from trainer.checkpoint.directory import whole_checkpoints

Run = Callable[..., object]


def outputs(directory: Path) -> dict[str, str]:
    """sha256 by path, from the manifest."""
    manifest = json.loads((directory / "manifest.json").read_text())
    return {output["path"]: output["sha256"] for output in manifest["outputs"]}


def points(log: Path) -> list[str]:
    """The failpoints a run passed, each once, in order."""
    return list(dict.fromkeys(log.read_text().split()))


def kill_everywhere(module: str, words: list[object], tmp_path: Path, *, least: int) -> None:
    """Kill `python -m module words… --out DIR` at each of its failpoints (at least `least`), and run it again."""
    log = tmp_path / "points"
    straight = tmp_path / "straight"
    done = forked(module, *words, "--out", straight, FAILPOINT="none", FAILPOINT_LOG=str(log))
    assert done.returncode == 0, done.stdout
    wanted = outputs(straight)
    names = points(log)
    assert len(names) >= least, names
    for name in names:
        out = tmp_path / "killed"
        assert forked(module, *words, "--out", out, FAILPOINT=name).returncode == -signal.SIGKILL, name
        done = forked(module, *words, "--out", out)
        assert done.returncode == 0, (name, done.stdout)
        assert outputs(out) == wanted, name
        assert not list(out.rglob("*.tmp")), name
        shutil.rmtree(out)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokens")
    write_corpus(directory / "corpus.txt")
    words = ("--source", directory / "corpus.txt", "--vocab-size", 300, "--held-out", 0.1, "--processes", 1)
    assert forked("stages.tokenize", *words, "--out", directory / "out").returncode == 0
    return directory / "out"


@pytest.mark.slow
def test_tokenize(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    words = ["--source", tmp_path / "corpus.txt", "--vocab-size", 300, "--held-out", 0.1, "--processes", 1]
    kill_everywhere("stages.tokenize", words, tmp_path, least=20)


@pytest.mark.slow
def test_shard(tokens: Path, tmp_path: Path) -> None:
    words = ["--tokens", tokens, "--seq-len", 32, "--max-pred-len", 5, "--shards", 3, "--processes", 1]
    kill_everywhere("stages.shard", words, tmp_path, least=20)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["file", "http"])
def test_download(tokens: Path, tmp_path: Path, over: str) -> None:
    made = tmp_path / "made"
    words = ("--tokens", tokens, "--seq-len", 32, "--max-pred-len", 5, "--shards", 2, "--processes", 1)
    assert forked("stages.shard", *words, "--out", made).returncode == 0
    shutil.make_archive(str(tmp_path / "archive"), "tar", made)
    words = ["--processes", 1]
    if over == "file":
        kill_everywhere("stages.download", [tmp_path / "archive.tar", *words], tmp_path, least=15)
        return
    with serving((tmp_path / "archive.tar").read_bytes()) as web:
        kill_everywhere("stages.download", [web.url, *words], tmp_path, least=25)


@pytest.mark.slow
def test_precompile(tmp_path: Path) -> None:
    kill_everywhere("stages.precompile", [], tmp_path, least=8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of two steps, and the data it was trained on."""
    directory = tmp_path_factory.mktemp("trained")
    data = write_dataset(directory / "data", [40])
    model = write_model_config(directory)
    values = {"max_steps": 2, "warmup_steps": 0, "batch_size": 4, "grad_accum_usteps": 2, "max_pred_len": 5}
    done = train(data_dir=data, model_config=model, output_dir=directory / "out", device="cpu", **values)
    assert done.returncode == 0, done.stdout
    return directory / "out" / "checkpoints" / "ckpt_2", data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words", "least"),
    [
        ("stages.convert", ("--tensor-parallel-size", 2), 24),
        ("stages.convert", ("--to", "pt"), 10),
        ("stages.merge", ("--with-optimizer",), 15),
    ],
)
def test_convert_and_merge(
    trained: tuple[Path, Path], tmp_path: Path, module: str, words: tuple[object, ...], least: int
) -> None:
    checkpoint, _ = trained
    log, straight = tmp_path / "points", tmp_path / "straight"
    assert forked(module, checkpoint, straight, *words, FAILPOINT="none", FAILPOINT_LOG=str(log)).returncode == 0
    names = points(log)
    assert len(names) >= least
    for name in names:
        out = tmp_path / "killed"
        assert forked(module, checkpoint, out, *words, FAILPOINT=name).returncode == -signal.SIGKILL, name
        done = forked(module, checkpoint, out, *words)
        assert done.returncode == 0, (name, done.stdout)
        assert outputs(out) == outputs(straight), name
        shutil.rmtree(out)


TRAINING = {
    "batch_size": 4, "warmup_steps": 1, "lr": 1e-3, "max_pred_len": 5, "device": "cpu", "resume_ckpt": True,
    "ckpt_interval_steps": 2, "num_ckpts_to_keep": 2, "max_steps": 6,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_at_every_point(tmp_path: Path) -> None:
    """Four steps an epoch, so the kills are in the middle of an accumulation, a shard and an epoch, at an epoch's end
    and at every write and rename of every checkpoint. Dropout is on."""
    data, model = write_dataset(tmp_path / "data", [21, 19]), write_model_config(tmp_path)
    values = {**TRAINING, "data_dir": data, "model_config": model, "grad_accum_usteps": 2}
    log = tmp_path / "points"
    env = {"FAILPOINT": "none", "FAILPOINT_LOG": str(log)}
    done = train(env=env, output_dir=tmp_path / "straight", **values)
    assert done.returncode == 0, done.stdout
    wanted = tensors(tmp_path / "straight" / "checkpoints" / "ckpt_6")
    names = points(log)
    assert len([name for name in names if name.startswith("micro-step:")]) == 12
    assert len([name for name in names if name.startswith("step:")]) == 6
    assert len([name for name in names if name.startswith(("write", "rename"))]) >= 20
    assert len([name for name in names if name.startswith("training-end:")]) == 4
    resumed = set()
    for name in names:
        out = tmp_path / "killed"
        assert train(env={"FAILPOINT": name}, output_dir=out, **values).returncode == -signal.SIGKILL, name
        kept = newest(out)
        resumed.add(kept)
        done = train(output_dir=out, **values)
        assert done.returncode == 0, (name, done.stdout)
        assert (f"ckpt_{kept} at step {kept}\n" if kept else "with initial weights") in done.stdout, name
        got = tensors(out / "checkpoints" / "ckpt_6")
        assert all(got[key].tobytes() == tensor.tobytes() for key, tensor in wanted.items()), name
        assert_results(out, tmp_path / "straight", name)
        shutil.rmtree(out)
    assert resumed == {0, 2, 4, 6}


def newest(out: Path) -> int:
    """The step of the newest complete checkpoint in a killed run's output; 0: none."""
    return next((step for step, _ in whole_checkpoints(out / "checkpoints")), 0)


def assert_results(out: Path, straight: Path, name: str) -> None:
    """results.json and metrics.jsonl of a killed run equal those of an uninterrupted one, except for the rates."""
    own = {"train_time_minutes", "throughput_average", "throughput_peak", "iterations_per_s"}
    found, wanted = (json.loads((directory / "results.json").read_text()) for directory in (out, straight))
    assert found.keys() == wanted.keys(), name
    assert {key: found[key] for key in found.keys() - own} == {key: wanted[key] for key in wanted.keys() - own}, name
    known = {key for key in own if wanted[key] is not None}  # an epoch of two steps has no rate
    assert all(found[key] > 0 for key in known), (name, found)
    assert all(found[key] is None for key in own - known), (name, found)
    assert losses(out) == losses(straight), name


@pytest.mark.slow
def test_the_end_of_a_training_in_the_chain(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Luigi or the trainer is killed between any two writes from the last checkpoint to the link of the complete stage:
    the next run succeeds and says so; summary and report have the numbers of the whole phase."""
    chain = finished_chain(tmp_path_factory).copy(tmp_path / "chain")
    phase2 = chain.latest("pretrain-phase2")
    token = tmp_path / "token"

    def unfinish() -> None:
        for name in ("manifest.json", "results.json"):
            (phase2 / name).unlink()

    # `test_training_at_every_point` covers every point of the trainer; here, one between any two processes' writes.
    names = (
        *("training-end:saved", "rename-after:results.json", "write-before:manifest.json"),
        *("rename-after:manifest.json", "link-before:pretrain-phase2"),
    )
    for name in names:
        unfinish()
        token.touch()
        env = {"LUIGI_CONFIG_PATH": str(chain.config), "FAILPOINT": name, "FAILPOINT_TOKEN": str(token)}
        killed = command(*LUIGI, "Pretrain", "--phase", "2", env=env)
        assert not token.exists(), (name, killed.stderr)
        if killed.returncode:  # luigi itself was killed; it would have restarted a trainer
            assert killed.returncode == -signal.SIGKILL, (name, killed.stderr)
            chain.run("Pretrain", "--phase", "2")
        counts = json.loads((phase2 / "manifest.json").read_text())["counts"]
        assert counts["throughput_average"] > 0, name
        assert counts["first_loss"] == losses(phase2)[0], name
    shutil.rmtree(chain.latest("report"))
    done = chain.run("BertPhase2")
    assert "phase 2: 4 steps, loss " in done.stderr, done.stderr
    assert "not recorded" not in done.stderr
    chain.ask("report")


@pytest.mark.slow
def test_the_summary_of_a_phase_whose_rate_is_not_known(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As an earlier version left it when it was killed before writing its results."""
    chain = finished_chain(tmp_path_factory).copy(tmp_path / "chain")
    path = chain.latest("pretrain-phase1") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["counts"] |= {"throughput_average": None, "first_loss": None}
    path.write_text(json.dumps(manifest))
    done = chain.run("BertPhase2")
    assert "phase 1: 8 steps, loss not recorded → " in done.stderr
    assert ", not recorded sequences/s" in done.stderr
    chain.ask("report")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "phase"), [(2, 1), (4, 2)])
def test_training_with_workers_in_both_phases(
    trained: tuple[Path, Path], tmp_path: Path, workers: int, phase: int
) -> None:
    """One worker is killed: in the middle of an accumulation, at an epoch's end, while saving."""
    checkpoint, _ = trained
    data, model = write_dataset(tmp_path / "data", [37, 30]), write_model_config(tmp_path)
    start = {"phase2": True, "phase1_end_step": 2, "resume_ckpt_path": checkpoint} if phase == 2 else {}
    values = {**TRAINING, **start, "data_dir": data, "model_config": model, "grad_accum_usteps": 8 // workers}
    values["batch_size"] = 2
    first = 2 if phase == 2 else 0
    done = train(workers, output_dir=tmp_path / "straight", **values)
    assert done.returncode == 0, done.stdout
    wanted = tensors(tmp_path / "straight" / "checkpoints" / f"ckpt_{first + 6}")
    names = (
        f"micro-step:{first + 3}.1.{workers - 1}", f"step:{first + 4}.1", f"micro-step:{first + 4}.0.0",
        "write-after:optimizer-00-of-01.safetensors", f"rename-after:ckpt_{first + 4}",
    )  # fmt: skip
    resumed = set()
    for name in names:
        out = tmp_path / "killed"
        assert train(workers, env={"FAILPOINT": name}, output_dir=out, **values).returncode == -signal.SIGKILL, name
        kept = newest(out)
        resumed.add(kept)
        done = train(workers, output_dir=out, **values)
        assert done.returncode == 0, (name, done.stdout)
        assert (f"ckpt_{kept} at step {kept}\n" if kept else f"starting phase {phase} at step") in done.stdout, name
        got = tensors(out / "checkpoints" / f"ckpt_{first + 6}")
        assert all(got[key].tobytes() == tensor.tobytes() for key, tensor in wanted.items()), name
        shutil.rmtree(out)
    assert {first + 3, first + 4} <= resumed, "the other workers have saved the last whole step"


@pytest.mark.slow
def test_luigis_own_writes(tmp_path: Path) -> None:
    """stage.json, the link in latest/, and the record of input files."""
    chain = Chain(tmp_path)
    log = tmp_path / "points"
    chain.run("Precompile", "--phase", "1", FAILPOINT="none", FAILPOINT_LOG=str(log))
    own = [name for name in points(log) if name.split(":")[1] in ("stage.json", "inputs.json", "precompile-phase1")]
    assert {name.split(":")[0] for name in own} >= {"link-before", "link-after", "write-before", "rename-after"}
    for name in own:
        shutil.rmtree(chain.latest("precompile-phase1"))
        (chain.work / "latest" / "precompile-phase1").unlink()
        (chain.work / "inputs.json").unlink()
        env = {"LUIGI_CONFIG_PATH": str(chain.config), "FAILPOINT": name}
        assert command(*LUIGI, "Precompile", "--phase", "1", env=env).returncode == -signal.SIGKILL, name
        chain.run("Precompile", "--phase", "1")
        assert outputs(chain.latest("precompile-phase1")), name
