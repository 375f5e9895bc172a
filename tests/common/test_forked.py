"""Commands that are forked from a process which has imported torch, beside the same commands in a new interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common import forked
from common.forked import Forked, NewInterpreter, start_python
from common.process import PARENT_VARIABLE
from tests.helpers.chain import wait_until
from tests.helpers.support import ROOT, start_fork_server

PROBE = """
import atexit, json, multiprocessing, os, random, resource, signal, sys, tempfile

def double(x):
    return 2 * x

if __name__ == "__main__":
    limits = {name: resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
    signals = {s: str(signal.getsignal(s)) for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)}
    streams = [(s.encoding, s.errors, s.isatty(), s.fileno(), s.line_buffering, s is not sys.stdin and s.write_through)
               for s in (sys.stdin, sys.stdout, sys.stderr)]
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


@pytest.fixture(autouse=True)
def server() -> None:
    start_fork_server()
    if forked.way_to_server() == ({}, []):
        pytest.skip("this system has no pidfd_open: every command is a new interpreter")


def begin(tmp_path: Path, program: str, *words: str, **variables: str) -> Forked | NewInterpreter:
    """Start `python -m program words…` in `tmp_path`; its output goes to the file `output` there."""
    (tmp_path / "program.py").write_text(program)
    with (tmp_path / "output").open("wb") as file:
        return start_python(
            ["-m", "program", *words], environment={**os.environ, **variables}, output=file.fileno(), directory=tmp_path
        )


def said(tmp_path: Path) -> str:
    return (tmp_path / "output").read_text()


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Of this process, other than those of the server."""
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


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_it_is_as_a_new_interpreter_would_be(tmp_path: Path, unbuffered: str, threads: str) -> None:
    found: dict[type, dict[str, Any]] = {}
    # A variable that is read at the start decides which of both it is.
    for kind, extra in ((Forked, {}), (NewInterpreter, {"MALLOC_ARENA_MAX": "3"})):
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
    assert ours["threads"] == int(threads)
    assert ours == theirs


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0), ("import sys; sys.exit(75)", 75), ("raise SystemExit('error: so')", 1), ("1 / 0", 1),
        ("import os; os._exit(9)", 9), ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()", 0),
        ("import sys; sys.stdout.close()", 0), ("import no_such_module", 1),
    ],
)  # fmt: skip
def test_it_ends_as_a_new_interpreter_does(tmp_path: Path, program: str, status: int) -> None:
    ends = []
    for extra in ({}, {"MALLOC_ARENA_MAX": "3"}):
        process = begin(tmp_path, program, **extra)
        assert process.wait(60) == process.poll() == status
        # What runs a module differs; the module's own lines do not.
        ends.append([line for line in said(tmp_path).splitlines() if 'File "' not in line and "main()" not in line])
    ours, theirs = ([line for line in end if "_run_" not in line and "runpy" not in line] for end in ends)
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


def test_it_is_found_by_its_name(tmp_path: Path) -> None:
    word = "w" * 3000
    process = begin(tmp_path, "import time; time.sleep(60)", word)
    try:
        wait_until(lambda: f"-m program {word}" in " ".join(psutil.Process(process.pid).cmdline()), timeout_s=30)
    finally:
        process.signal_group(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_descriptors_are_those_that_were_given(tmp_path: Path) -> None:
    """A lock that the starter holds is held as long as the command has it."""
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


#: Starts a command with a server of its own, says its id, and waits.
STARTER = """
import os, sys, time
from pathlib import Path
from common.forked import start, start_python
start(("json",))
for _ in range(int(sys.argv[2])):
    process = start_python(["-m", "program"], environment=os.environ, output=1, directory=Path(sys.argv[1]))
    print(type(process).__name__, process.pid, flush=True)
    if sys.argv[2] != "1":
        print("ended", process.wait(), flush=True)
        time.sleep(0.5)  # the last of the server's descriptors is closed
time.sleep(100)
"""


@contextlib.contextmanager
def starter(tmp_path: Path, commands: int = 1, program: str = STARTER) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "program.py").write_text("import time; time.sleep(100)")
    variables = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(commands)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=variables,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    word, number = process.stdout.readline().split()
    return word, int(number)


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_it_dies_with_its_starter_and_so_does_the_server(tmp_path: Path) -> None:
    with starter(tmp_path) as process:
        kind, command = answer(process)
        assert kind == "Forked"
        server = psutil.Process(command).ppid()
        assert psutil.Process(server).ppid() == process.pid
        process.kill()
    for pid in (command, server):
        wait_until(lambda pid=pid: is_gone(pid), timeout_s=10)  # type: ignore[misc]


def test_a_lost_server_takes_its_commands_along_and_the_next_one_starts_all_the_same(tmp_path: Path) -> None:
    with starter(tmp_path, commands=2) as process:
        kind, command = answer(process)
        os.kill(psutil.Process(command).ppid(), signal.SIGKILL)
        assert answer(process) == ("ended", -signal.SIGKILL)
        wait_until(lambda: is_gone(command), timeout_s=10)
        kind, command = answer(process)
        assert kind == "NewInterpreter"
        os.kill(command, signal.SIGKILL)


def test_one_that_is_stopped_before_it_is_forked_never_runs(tmp_path: Path) -> None:
    """While the server imports torch, a signal ends the command that waits for it."""
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, 'up').touch()\ntime.sleep(2)"
    )
    program = f"""
import os, signal, sys, time
from pathlib import Path
from common.forked import start, start_python
start(("slow",))
while not Path({str(tmp_path)!r}, "up").exists():
    time.sleep(0.01)
process = start_python(["-m", "program"], environment=os.environ, output=1, directory=Path({str(tmp_path)!r}))
process.signal_group(signal.SIGTERM)
assert process.wait() == -signal.SIGTERM
time.sleep(4)
"""
    (tmp_path / "program.py").write_text("open('ran', 'w')")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "up").exists()
    assert not (tmp_path / "ran").exists()


def test_a_module_that_cannot_be_imported_does_not_stop_the_server(tmp_path: Path) -> None:
    with starter(tmp_path, program=STARTER.replace("json", "no_such_module")) as process:
        assert answer(process)[0] == "Forked"


def test_a_variable_without_its_descriptor_is_passed_over(tmp_path: Path) -> None:
    """As a child of a child meets it, where what is between starts it in its own way."""
    way, _ = forked.way_to_server()
    program = STARTER.replace('start(("json",))', "").replace("time.sleep(100)", "process.wait()")
    (tmp_path / "program.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "1"], cwd=ROOT, env={**os.environ, **way}, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("NewInterpreter ")


def test_many_at_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; sys.exit(int(sys.argv[1]) % 100)")
    with (tmp_path / "output").open("wb") as file:
        processes = [
            start_python(
                ["-m", "program", str(number)], environment=os.environ, output=file.fileno(), directory=tmp_path
            )
            for number in range(60)
        ]
    assert [process.wait(60) for process in processes] == list(range(60))
    (server,) = [child for child in psutil.Process().children() if "common.fork_server" in " ".join(child.cmdline())]
    assert not server.children()
