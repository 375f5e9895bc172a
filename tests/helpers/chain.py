"""The whole chain on a tiny corpus, through the real commands."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from common.forked import way_to_server
from tests.helpers.support import ROOT, command, start_fork_server

LUIGI = ("-m", "luigi", "--module", "pipeline")
WORDS = "time year people way day man thing woman life child world school state family student group country problem"

CONFIG = """
[run]
work_dir = {directory}/work
log_interval = 2
processes = 1
[corpus]
source = {directory}/corpus.txt
held_out = 0.1
vocab_size = 300
[dataset]
shards = 2
[model]
num_hidden_layers = 1
hidden_size = 32
num_attention_heads = 2
intermediate_size = 64
max_position_embeddings = 64
[phase1]
seq_len = 32
max_pred_len = 5
global_batch_size = 16
micro_batch_size = 8
warmup_steps = 2
max_steps = 8
ckpt_interval_steps = 3
word_embeddings = random
initial_attention = random
[phase2]
seq_len = 64
max_pred_len = 10
global_batch_size = 8
micro_batch_size = 4
warmup_steps = 2
max_steps = 4
ckpt_interval_steps = 2
"""

STAGES = (
    "tokenize_corpus", "shard_dataset-phase1", "shard_dataset-phase2", "precompile-phase1", "precompile-phase2",
    "pretrain-phase1", "convert_checkpoint", "pretrain-phase2", "merge_shards", "evaluate", "report",
)  # fmt: skip


def write_corpus(path: Path, documents: int = 60, *, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    words = WORDS.split()
    texts = []
    for _ in range(documents):
        sentences = [
            " ".join(rng.choice(words, size=rng.integers(4, 14))).capitalize() + "." for _ in range(rng.integers(4, 20))
        ]
        texts.append("\n".join(sentences))
    path.write_text("\n\n".join(texts))


#: The steps of a training that runs until it is stopped.
ENDLESS = "100000"


class Chain:
    """A corpus, a configuration and a work directory, all in `directory`."""

    def __init__(self, directory: Path, extra: str = "") -> None:
        self.directory = directory
        if not (directory / "corpus.txt").exists():
            write_corpus(directory / "corpus.txt")
        self.config = directory / "test.cfg"
        self.config.write_text(CONFIG.format(directory=directory) + extra)
        self.work = directory / "work"

    def copy(self, directory: Path) -> Chain:
        """The same corpus and work directory in another place, for a test that changes them."""
        shutil.copytree(self.directory, directory, symlinks=True, dirs_exist_ok=True)
        return Chain(directory)

    def run(self, *words: str, status: int = 0, **kwargs: object):  # type: ignore[no-untyped-def]
        done = command(*LUIGI, *words, env={"LUIGI_CONFIG_PATH": str(self.config), **kwargs})  # type: ignore[dict-item]
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def start(self, *words: str, log: str = "luigi.log", **env: str) -> subprocess.Popen[bytes]:
        """Start luigi; its output goes to a file in the chain's directory."""
        with (self.directory / log).open("wb") as file:
            return start_luigi(self.config, *words, stdout=file, stderr=file, **env)

    def lose(self, luigi: subprocess.Popen[bytes]) -> None:
        """Kill luigi and, at once, everything that works for it, as when the machine is lost: if luigi alone is killed,
        a training saves first. Workers may be forked elsewhere, but each has the lock of its directory open."""
        luigi.kill()
        while workers := [one for one in psutil.process_iter() if self._is_used_by(one)]:
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
            psutil.wait_procs(workers, timeout=30)
        luigi.wait()

    def _is_used_by(self, process: psutil.Process) -> bool:
        try:
            return any(Path(file.path).is_relative_to(self.work) for file in process.open_files())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def ask(self, *words: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """`python -m pipeline words…`"""
        done = command("-m", "pipeline", *words, env={"LUIGI_CONFIG_PATH": str(self.config), **env})
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def without_torch(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a program, which must succeed without the imports that take a second or more."""
        heavy = "{'torch', 'transformers', 'h5py', 'numpy'}"
        check = f"import sys; heavy = {heavy} & set(sys.modules)\nassert not heavy, heavy\n"
        done = command("-c", program + check, env={"LUIGI_CONFIG_PATH": str(self.config)})
        assert done.returncode == 0, done.stderr
        return done

    def status(self, *words: str, **env: str) -> dict[str, dict[str, Any]]:
        """The rows of `python -m pipeline status --json` by stage."""
        return {row["stage"]: row for row in json.loads(self.ask("status", "--json", *words, **env).stdout)}

    def latest(self, stage: str) -> Path:
        return (self.work / "latest" / stage).resolve()

    def manifest(self, stage: str) -> dict[str, object]:
        manifest: dict[str, object] = json.loads((self.latest(stage) / "manifest.json").read_text())
        return manifest

    def directories(self) -> set[str]:
        """The names of all stage directories."""
        return {path.name for path in self.work.iterdir() if (path / "stage.json").exists()}


def start_luigi(
    config: Path,
    *words: str,
    stdout: Any = None,
    stderr: Any = None,
    text: bool = False,
    prefix: tuple[str, ...] = (),
    stdin: Any = subprocess.DEVNULL,
    **env: str,
) -> subprocess.Popen[Any]:
    """Start `luigi words…`, whose stages are forked by the test run's server. A training of `ENDLESS` steps is slow, to
    leave the processors to other tests."""
    start_fork_server()
    way, control = way_to_server()
    if ENDLESS in words:
        env = {"FAILPOINT": "none", "FAILPOINT_PAUSE": "0.03", **env}
    return subprocess.Popen(
        [*prefix, sys.executable, *LUIGI, *words], cwd=ROOT, stdin=stdin, stdout=stdout, stderr=stderr, text=text,
        pass_fds=control, env={**os.environ, "LUIGI_CONFIG_PATH": str(config), **way, **env},
    )  # fmt: skip


def finished_chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A chain that has run to its end; one for all tests of a session, to be copied by those that change it."""
    return _ran(tmp_path_factory.getbasetemp(), "BertPhase2")


def prepared_chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A chain whose phase 1 can train; one for all tests of a session, to be copied."""
    return _ran(tmp_path_factory.getbasetemp(), "Precompile", "--phase", "1")


@functools.cache
def _ran(base: Path, *words: str) -> Chain:
    directory = base / words[0]
    directory.mkdir()
    chain = Chain(directory)
    chain.run(*words)
    return chain


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Processes started in the block have one core. Workers share a machine's cores, and the number of threads affects
    the last bits of sums: this way it is the same for the workers of one machine and of several."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def wait_until(holds: Callable[[], bool], *, timeout_s: float = 120, every_s: float = 0.2) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited for {timeout_s} s"
        time.sleep(every_s)
