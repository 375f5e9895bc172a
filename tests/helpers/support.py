"""What several test files need: a small synthetic data set, and the real commands."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import common.forked as fork_client
from common.forked import PRELOADED, Forked, NewInterpreter, start, start_python
from common.process import free_port
from trainer.data.shards import write_shard
from trainer.machine.sample import sample_rows

ROOT = Path(__file__).parents[2]
VOCAB = 200
#: Two workers on this machine under torchrun; the trainer's options follow.
TORCHRUN = (
    *("-m", "trainer.launch.torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2"),
    *("-m", "trainer"),
)
#: The smallest model with more than one layer and head.
MODEL = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def synthetic_rows(rows: int, *, seq_len: int, max_pred_len: int, seed: int) -> dict[str, np.ndarray]:
    """Well-formed examples of random ids."""
    return sample_rows(rows, vocab_size=VOCAB, seq_len=seq_len, max_pred_len=max_pred_len, seed=seed)


def write_dataset(directory: Path, rows_per_shard: list[int], *, seq_len: int = 32, max_pred_len: int = 5) -> Path:
    """Training shards with these numbers of rows."""
    directory.mkdir(parents=True, exist_ok=True)
    for shard, rows in enumerate(rows_per_shard):
        arrays = synthetic_rows(rows, seq_len=seq_len, max_pred_len=max_pred_len, seed=shard)
        write_shard(directory / f"synthetic_training_{shard}.hdf5", arrays)
    return directory


def write_model_config(directory: Path, **changes: Any) -> Path:
    path = directory / "model.json"
    path.write_text(json.dumps({**MODEL, **changes}))
    return path


def options(**values: Any) -> list[str]:
    """`--name value` for each; True: a flag, False: left out; a tuple: several values."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def command(*words: str, env: dict[str, str] | None = None, timeout: float = 590) -> subprocess.CompletedProcess[str]:
    """Run `python words…` from the repository root, forked where possible; both outputs are captured, nothing is
    checked."""
    start_fork_server()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_python(
            words, environment={**os.environ, **(env or {})}, output=output.fileno(), errors=errors.fileno(),
            directory=ROOT,
        )  # fmt: skip
        try:
            status = process.wait(timeout)
        finally:
            process.signal_group(signal.SIGKILL)
            process.wait()
        texts = [file.seek(0) or file.read().decode() for file in (output, errors)]
    return subprocess.CompletedProcess(list(words), status, *texts)


#: Imported by commands of the trainer and of stages. The commands' own modules are not: runpy runs those anew.
INNER_MODULES = (
    *("trainer.rollback", "trainer.devices.cpu", "trainer.devices.cpu_operations", "trainer.launch.environment"),
    *("trainer.launch.spawn", "trainer.launch.rendezvous", "trainer.metrics.budget", "trainer.metrics.companions"),
    *("trainer.metrics.rehearsal", "trainer.metrics.trackers.tensorboard", "trainer.optim.muon", "trainer.optim.lamb"),
    *("trainer.optim.sgd", "stages.directory.command", "stages.directory.options", "stages.directory.builders"),
    *("stages.text.corpus", "stages.text.wikipedia", "stages.tokens.encode", "stages.tokens.parts"),
    *("stages.tokens.wordpiece", "stages.tokens.data_card", "stages.examples.shards", "stages.examples.packing"),
    *("stages.examples.pairs", "stages.examples.plans", "stages.transfer.fetch", "stages.transfer.shard_import"),
    *("stages.transfer.checkpoint_source", "stages.view.card", "stages.view.goodput", "stages.view.curves"),
    *("stages.store.options", "concurrent.futures.process", "multiprocessing", "configparser", "email.utils"),
)


def start_fork_server(*modules: str) -> None:
    """The server for all that a test process starts; it has imported torch, what luigi imports, what commands import
    when they run, and `modules`."""
    libraries = ("requests", "jsonschema", "jinja2", "tenacity", "tornado.ioloop", "prometheus_client", "yaml", "tqdm")
    start((*PRELOADED, *libraries, *INNER_MODULES, *modules))


def require_torch_xla() -> None:
    """Skip the test if torch_xla is not installed. It is not imported here: that takes 5 s."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")


#: For servers of modules whose tests run the self-test, which compares with Hugging Face's model.
SELF_TEST_MODULES = ("transformers.models.bert.modeling_bert", "trainer.machine.self_test")
#: Servers of `fork_server` that are kept, by what they have imported.
_kept: dict[tuple[str, ...], Any] = {}


@contextlib.contextmanager
def fork_server(*modules: str, **environment: str) -> Iterator[None]:
    """In the block, commands are forked by a server of their own with the variables `environment`, which has imported
    `modules` as well. Without variables it is kept for the next block."""
    before, fork_client._client = fork_client._client, None if environment else _kept.get(modules)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            start_fork_server(*modules)
        yield
    finally:
        if environment:
            fork_client.stop()
        else:
            _kept[modules] = fork_client._client
        fork_client._client = before


def stop_fork_servers() -> None:
    """Stop all fork servers of this process."""
    for client in (fork_client._client, *_kept.values()):
        fork_client._client = client
        fork_client.stop()


class Workers:
    """`python -m module words…` in one or more processes, as torchrun would start them. The e2e tests go through
    torchrun itself."""

    def __init__(self, count: int, module: str, words: list[str], env: dict[str, str]) -> None:
        start_fork_server()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `wait`)
        self.processes: list[Forked | NewInterpreter] = []
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        for rank in range(count):
            variables = {**env, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            process = start_python(
                ["-m", module, *words], environment={**os.environ, **variables}, output=self._output.fileno(),
                directory=ROOT,
            )  # fmt: skip
            self.processes.append(process)

    def wait(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Join all; a failed worker takes the others with it, as under torchrun. The status is the first failure's."""
        deadline = time.monotonic() + timeout
        alive, status = list(self.processes), 0
        while alive and time.monotonic() < deadline:
            for process in [process for process in alive if process.poll() is not None]:
                alive.remove(process)
                if process.returncode and not status:
                    status = process.returncode
                    for other in alive:
                        other.signal_group(signal.SIGTERM)
            time.sleep(0.01)
        text = self.said()
        self.end()
        assert not alive, f"still running after {timeout} s:\n{text}"
        return subprocess.CompletedProcess([], status, text, "")

    def said(self) -> str:
        """What they have printed so far, read without moving the file position, which they share."""
        file = self._output.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def end(self) -> None:
        """Kill those that still run."""
        for process in self.processes:
            process.signal_group(signal.SIGKILL)
            process.wait()
        self._output.close()


#: Starts functions in processes that have imported torch already.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trainer.loop", "trainer.devices.select"])


def all_end(target: Callable[..., None], count: int, *arguments: object) -> None:
    """Run `target(rank, port, …)` in `count` processes, all of which must succeed."""
    port = free_port()
    workers = [FORKS.Process(target=target, args=(rank, port, *arguments)) for rank in range(count)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(300)
            assert worker.exitcode == 0
    finally:
        for worker in workers:
            worker.kill()


def train(workers: int = 1, *, env: dict[str, str] | None = None, **values: Any) -> subprocess.CompletedProcess[str]:
    """Run the trainer to its end."""
    return Workers(workers, "trainer", options(**values), env or {}).wait()


def forked(module: str, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m module words…` to its end, started fast; environment variables as keywords."""
    return Workers(1, module, [str(word) for word in words], env).wait()


def assert_resumed(done: subprocess.CompletedProcess[str], given: Mapping[str, object]) -> None:
    """A training whose options `given` ask it to resume a phase has done so: from the initial weights, the same bytes
    prove nothing. (Phase 2 may also start from phase 1's weights.)"""
    if given.get("resume_ckpt") and not given.get("phase2"):
        found = re.findall(r"resuming from checkpoint \S+ at step \d+", done.stdout)
        assert len(found) == 1, done.stdout


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The whole lines: a training that runs may be writing the last one."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(output_dir: Path) -> list[float]:
    return [record["loss"] for record in metrics(output_dir)]


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint that is not split: parameters and moments."""
    merged: dict[str, np.ndarray] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        found = load_file(path)
        assert not merged.keys() & found.keys(), f"{checkpoint} is split"
        merged.update(found)
    return merged


def assert_same_bytes(checkpoint: Path, wanted: Path, *, why: object = "") -> None:
    """Both hold parameters and moments, in files of the same names and bytes: one of each for each rank."""
    files, expected = ({path.name: path for path in found.glob("*.safetensors")} for found in (checkpoint, wanted))
    assert files.keys() == expected.keys(), why
    assert {name.split("-")[0] for name in files} == {"model", "optimizer"}
    for name, path in expected.items():
        assert files[name].read_bytes() == path.read_bytes(), (name, why)


def flip_a_byte(path: Path) -> None:
    """Change a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def assert_workers_error(done: subprocess.CompletedProcess[str], rank: int, *fragments: str, size: int = 1) -> None:
    """One of `size` workers ended the run with one line that holds all `fragments`; an error all agreed on names no
    worker. The others may name its error or their own, or have lost their connection to it."""
    if size == 1:
        return assert_one_line_error(done, *fragments)
    output = done.stdout
    assert done.returncode in (1, 70), output
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    errors = [line for line in said if line.startswith(f"error: worker {rank}: ") or "error: worker " not in line]
    assert len(errors) == 1, output
    for fragment in fragments:
        assert fragment in errors[0], errors[0]


def assert_one_line_error(done: subprocess.CompletedProcess[str], *fragments: str, status: int = 1) -> None:
    """The command ended with `status`, one `error:` line holding all `fragments`, and no traceback."""
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    for fragment in fragments:
        assert fragment in errors[0], errors[0]
