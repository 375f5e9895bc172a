"""Commands forked from a process that has imported torch, compared with the same commands in a new interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common import forked
from common.forked import Forked, NewInterpreter, start_python
from tests.common.forks import KINDS, STARTER, begin, said
from tests.common.forks import server as server
from tests.helpers.chain import wait_until
from tests.helpers.support import ROOT

PROBE = """
import atexit, json, multiprocessing, os, random, resource, signal, sys, tempfile

def double(x):
    return 2 * x

if __name__ == "__main__":
    limits = {name: resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
    signals = {s: str(signal.getsignal(s)) for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)}
    streams = [(repr(s), s.errors, s.isatty(), s.fileno(), s.line_buffering, s is not sys.stdin and s.write_through,
                type(s.buffer).__name__, s is getattr(sys, f"__{name}__"))
               for name in ("stdin", "stdout", "stderr") for s in (getattr(sys, name),)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [1, 2])
    import torch
    print(json.dumps({
        "environment": dict(os.environ), "directory": os.getcwd(), "words": sys.argv, "path": sys.path,
        "flags": str(sys.flags), "executable": sys.executable, "limits": limits, "signals": signals,
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), "streams": streams,
        "cores": sorted(os.sched_getaffinity(0)), "session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "temporary": tempfile.gettempdir(), "spec": __spec__.name, "doubled": doubled,
        "threads": torch.get_num_threads(), "open": sorted(os.listdir("/proc/self/fd"), key=int)[:4],
    }))
    atexit.register(lambda: print("at the exit"))
"""


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Give this process surroundings other than those of the server."""
    import resource

    cores, mask = os.sched_getaffinity(0), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.sched_setaffinity(0, {max(cores)})
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize(("unbuffered", "threads"), [("", "1"), ("1", "2"), ("0", " 2,1")])
def test_it_is_as_a_new_interpreter_would_be(tmp_path: Path, unbuffered: str, threads: str) -> None:
    found: dict[type, dict[str, Any]] = {}
    for kind, extra in KINDS:
        with surroundings():
            words = ("a b", "--c", "é\udc80")
            process = begin(
                tmp_path, PROBE, *words, TMPDIR=str(tmp_path), PYTHONUNBUFFERED=unbuffered, OMP_NUM_THREADS=threads,
                SOMETHING="else", **extra,
            )  # fmt: skip
            assert type(process) is kind
            assert process.wait(60) == 0, said(tmp_path)
        report, last = said(tmp_path).splitlines()
        assert last == "at the exit"
        found[kind] = json.loads(report)
    ours, theirs = found[Forked], found[NewInterpreter]
    for each in (ours, theirs):
        for name in ("FORK_SERVER", "MALLOC_ARENA_MAX"):
            each["environment"].pop(name, None)
    assert ours["threads"] == int(threads.split(",")[0])
    assert ours == theirs


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0), ("import sys; sys.exit(75)", 75), ("raise SystemExit('error: so')", 1), ("1 / 0", 1),
        ("import os; os._exit(9)", 9), ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()", 0),
        ("import sys; sys.stdout.close()", 0), ("import no_such_module", 1), ("import sys; sys.exit(-2)", 254),
        ("import sys; sys.stdout = sys.stderr = None", 0),
    ],
)  # fmt: skip
def test_it_ends_as_a_new_interpreter_does(tmp_path: Path, program: str, status: int) -> None:
    ends = []
    for _, extra in KINDS:
        process = begin(tmp_path, program, **extra)
        assert process.wait(60) == process.poll() == status
        # The frames that run a module differ; the module's own lines do not.
        ends.append([line for line in said(tmp_path).splitlines() if 'File "' not in line and "main()" not in line])
    carets = re.compile(r"[ ~^]+$")  # Python 3.13 and newer mark a part of the line
    ours, theirs = (
        [line for line in end if "_run_" not in line and "runpy" not in line and not carets.match(line)] for end in ends
    )
    assert ours[-3:] == theirs[-3:]


def test_draws_of_different_commands_differ(tmp_path: Path) -> None:
    program = (
        "import random, uuid, numpy, os; print(random.random(), uuid.uuid4(), numpy.random.default_rng().random())"
    )
    drawn = set()
    for _ in range(3):
        assert begin(tmp_path, program).wait(60) == 0
        drawn |= set(said(tmp_path).split())
    assert len(drawn) == 9


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print('lost')", 120), ("import sys; print('lost'); sys.exit(75)", 120), ("print('lost'); 1 / 0", 120),
        ("print('lost'); raise KeyboardInterrupt", -signal.SIGINT), ("print('lost', flush=True)", 120),
        ("import sys; print('lost'); sys.stdout = None", 0),
    ],
)  # fmt: skip
def test_output_that_cannot_be_written_is_an_error(tmp_path: Path, program: str, status: int) -> None:
    (tmp_path / "program.py").write_text(program)
    lines = []
    for kind, extra in KINDS:
        with open("/dev/full", "wb") as full, (tmp_path / "errors").open("w+") as errors:
            process = start_python(
                ["-m", "program"], environment={**os.environ, "PYTHONUNBUFFERED": "", **extra}, output=full.fileno(),
                errors=errors.fileno(), directory=tmp_path,
            )  # fmt: skip
            assert type(process) is kind
            assert process.wait(60) == status
            lines.append(errors.read().splitlines()[-2:])
    assert lines[0] == lines[1]


def test_it_can_be_waited_for_as_a_popen(tmp_path: Path) -> None:
    for kind, extra in KINDS:
        process = begin(tmp_path, "import time; time.sleep(60)", **extra)
        assert type(process) is kind
        for timeout in (0.3, 0, -1):
            with pytest.raises(subprocess.TimeoutExpired) as raised:
                process.wait(timeout)
            assert (raised.value.timeout, raised.value.cmd) == (timeout, process.args)
        assert process.poll() is None
        process.signal_group(signal.SIGTERM)
        assert process.wait(30) == process.poll() == process.wait(0) == process.wait() == -signal.SIGTERM
        assert begin(tmp_path, "", **extra).wait(1e9) == 0


@pytest.mark.parametrize("threads", ["garbage", "0", "-1", "", ","])
def test_a_number_of_threads_that_is_none_is_passed_over(tmp_path: Path, threads: str) -> None:
    process = begin(tmp_path, "import torch; print(torch.get_num_threads())", OMP_NUM_THREADS=threads)
    assert type(process) is Forked
    assert process.wait(60) == 0, said(tmp_path)
    assert int(said(tmp_path)) > 0


def test_a_command_that_is_too_long_for_the_server_is_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = forked._current()
    assert client is not None
    room = client.control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    client.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # in case the system's own limit is higher
    try:
        for count, kind in ((1, Forked), (3, NewInterpreter)):
            long = {f"LONG_{number}": "x" * 100_000 for number in range(count)}
            process = begin(tmp_path, "import os; print(sum(name[:5] == 'LONG_' for name in os.environ))", **long)
            assert type(process) is kind
            assert process.wait(60) == 0, said(tmp_path)
            assert said(tmp_path) == f"{count}\n"
    finally:
        client.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room // 2)  # the system doubles it


def test_one_that_starts_elsewhere_does_not_reach_the_server(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['THERE'], 'FORK_SERVER' in os.environ, sys.argv[1:])"
    (tmp_path / "program.py").write_text(program)
    with (tmp_path / "output").open("wb") as file:
        process = start_python(
            ["-m", "program", "a b"], environment={**os.environ, **forked.way_to_server()[0]}, output=file.fileno(),
            directory=tmp_path, prefix=["env", "THERE=yes"],
        )  # fmt: skip
    assert type(process) is NewInterpreter
    assert process.wait(60) == 0, said(tmp_path)
    assert said(tmp_path) == "yes False ['a b']\n"


def test_one_that_could_not_begin_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    with (tmp_path / "output").open("wb") as file:
        process = start_python(
            ["-m", "program"], environment=os.environ, output=file.fileno(), directory=tmp_path / "none"
        )
    assert process.wait(60) == 1
    assert "FileNotFoundError" in said(tmp_path)


def test_it_is_found_by_its_name(tmp_path: Path) -> None:
    word = "w" * 3000
    process = begin(tmp_path, "import time; time.sleep(60)", word)
    try:
        wait_until(lambda: f"-m program {word}" in " ".join(psutil.Process(process.pid).cmdline()), timeout_s=30)
    finally:
        process.signal_group(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_descriptors_are_those_that_were_given(tmp_path: Path) -> None:
    """A lock that the starter holds stays held as long as the command has it."""
    import fcntl

    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "program.py").write_text(f"import os, time; os.fstat({lock.fileno()}); print('up'); time.sleep(60)")
        with (tmp_path / "output").open("wb") as file:
            process = start_python(
                ["-m", "program"], environment={**os.environ, "PYTHONUNBUFFERED": "1"}, output=file.fileno(),
                keep_open=[lock.fileno()], directory=tmp_path,
            )  # fmt: skip
        wait_until(lambda: "up" in said(tmp_path), timeout_s=30, every_s=0.02)
    with (tmp_path / "lock").open("w") as again:
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.signal_group(signal.SIGKILL)
        process.wait(30)
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_variable_without_its_descriptor_is_passed_over(tmp_path: Path) -> None:
    """As a grandchild sees it, when the process in between starts it in its own way."""
    way, _ = forked.way_to_server()
    program = STARTER.replace('start(("json",))', "").replace("time.sleep(100)", "process.wait()")
    (tmp_path / "program.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "1"], cwd=ROOT, env={**os.environ, **way}, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("NewInterpreter ")
