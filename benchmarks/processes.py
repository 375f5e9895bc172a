"""The processes of a benchmark: both sides on the same cores with as many threads, and nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from common.process import STOP_SIGNALS, die_with_parent, fork_without_warning, heeded_signals

ROOT = Path(__file__).parent.parent


@contextmanager
def on_cores(count: int, *, threads: int | None = None) -> Iterator[None]:
    """Restrict processes started in the block to `count` cores, with `threads` OpenMP threads (None: one per core)."""
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        sys.exit(f"error: {count} cores were requested, but there are {len(cores)}; give {len(cores)} or fewer")
    former = os.environ.get("OMP_NUM_THREADS")
    os.sched_setaffinity(0, cores[-count:])
    os.environ["OMP_NUM_THREADS"] = str(threads or count)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.environ.pop("OMP_NUM_THREADS")
        if former is not None:
            os.environ["OMP_NUM_THREADS"] = former


def start(
    *words: str, environment: Mapping[str, str] | None = None, cwd: Path = ROOT, **files: Any
) -> subprocess.Popen[Any]:
    """Start `python words…`, which dies with this process; `files`: stdin, stdout, stderr, text."""
    # If torch-xla is installed, Hugging Face's Trainer uses it by default.
    variables = {**os.environ, "USE_TORCH_XLA": "0", **(environment or {})}
    dies = functools.partial(die_with_parent, os.getpid())
    with fork_without_warning():
        return subprocess.Popen([sys.executable, *words], cwd=cwd, env=variables, preexec_fn=dies, **files)


def python(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """Run `python words…` from the repository root and return its stdout; exits if the command fails."""
    with start(*words, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{output}{errors}")
    return str(output)


def end_all(signum: int, frame: FrameType | None) -> None:
    """On the first stop signal: end all that this process has started, then exit, which cleans up."""
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    sys.exit(128 + signum)


# In every benchmark, but neither in tests of it nor in what it starts.
if (_main := sys.modules["__main__"].__spec__) is not None and _main.name.startswith("benchmarks."):
    for _signum in heeded_signals():
        signal.signal(_signum, end_all)


def launcher(workers: int) -> tuple[str, ...]:
    """The arguments before `-m trainer` that start `workers` workers on this machine."""
    if workers == 1:
        return ()
    return ("-m", "trainer.launch.torchrun", "--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={workers}")


def busy_s() -> float:
    """Total busy time of all cores since boot, in seconds; 0 without /proc/stat."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


@contextmanager
def others_cores() -> Iterator[Callable[[], float]]:
    """Yield a function that returns, after the block, the average number of cores used by unrelated programs."""

    def own_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began, busy, own = time.monotonic(), busy_s(), own_s()
    found = 0.0
    yield lambda: found
    found = max(0.0, (busy_s() - busy - (own_s() - own)) / (time.monotonic() - began))
