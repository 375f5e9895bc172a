"""The fork server's life, and how it treats many commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common import forked
from common.forked import Forked, start_python
from tests.common.forks import STARTER, answer, begin, is_gone, said, starter
from tests.common.forks import server as server
from tests.helpers.chain import wait_until
from tests.helpers.support import ROOT


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
    """While the server imports torch, a signal ends the command that is waiting for it."""
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\nhere = pathlib.Path({str(tmp_path)!r})\n(here / 'up').touch()\n"
        f"while not (here / 'signalled').exists(): time.sleep(0.01)"
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
Path({str(tmp_path)!r}, "signalled").touch()
time.sleep(2)
"""
    (tmp_path / "program.py").write_text("open('ran', 'w')")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "up").exists()
    assert not (tmp_path / "ran").exists()


#: What Python 3.12 and newer do where the kernel still counts a thread.
WARNING_FORK = """
import os, warnings
forked = os.fork
def fork():
    pid = forked()
    if pid:
        warnings.warn("This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the child.",
                      DeprecationWarning, stacklevel=2)
    return pid
os.fork = fork
"""


def test_a_fork_shows_no_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "warning_fork.py").write_text(WARNING_FORK)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport os\nos.environ['PYTHONPATH'] = sys.path[0]\n"
    with starter(tmp_path, program=program + STARTER.replace("json", "warning_fork")) as process:
        assert answer(process)[0] == "Forked"
    assert capfd.readouterr().err == ""


def test_a_module_that_cannot_be_imported_does_not_stop_the_server(tmp_path: Path) -> None:
    with starter(tmp_path, program=STARTER.replace("json", "no_such_module")) as process:
        assert answer(process)[0] == "Forked"


def test_one_that_dies_before_it_has_an_id(tmp_path: Path) -> None:
    """Its status is not mistaken for its id, to which signals would go."""
    client = forked._current()
    assert client is not None
    (tmp_path / "program.py").write_text("")
    with (tmp_path / "output").open("wb") as file:
        descriptors = {0: None, 1: file.fileno(), 2: file.fileno(), 1 << 22: file.fileno()}  # above any limit
        process = forked._fork(client, ["-m", "program"], os.environ, tmp_path, descriptors)
    assert process.wait(30) == 1
    with pytest.raises(ConnectionError):
        _ = process.pid


def test_a_fork_that_fails_is_the_loss_of_one_command(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("""
import os
fork = os.fork
def fail():
    os.fork = fork
    raise BlockingIOError("no more processes")
os.fork = fail
""")
    (tmp_path / "program.py").write_text("")
    program = STARTER.replace('"json"', '"failing"').replace("time.sleep(100)", "")
    program = program.replace("type(process).__name__} {process.pid", "type(process).__name__")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "2"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split() == ["Forked", "ended", "-9", "Forked", "ended", "0"]
    assert done.stderr == "error: a command could not be forked: no more processes\n"


@pytest.mark.timeout(60)
def test_a_signal_may_arrive_while_the_servers_word_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal's handler, which passes the signal on, runs in the same thread."""
    process = begin(tmp_path, "import time; time.sleep(60)")
    assert isinstance(process, Forked)
    take = process._take

    def interrupted(word: bytes) -> None:
        if process._pid is None:
            signal.raise_signal(signal.SIGUSR2)
        take(word)

    monkeypatch.setattr(process, "_take", interrupted)
    before = signal.signal(signal.SIGUSR2, lambda *_: process.signal_group(signal.SIGTERM))
    try:
        assert process.wait(30) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGUSR2, before)
    wait_until(lambda: is_gone(process.pid), timeout_s=10)


def test_draws_of_a_library_that_the_server_has_imported_differ(tmp_path: Path) -> None:
    program = STARTER.replace('"json"', '"numpy.random"').replace("time.sleep(100)", "")
    (tmp_path / "program.py").write_text("import os, numpy; os.write(1, b'%f\\n' % numpy.random.random())")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "2"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    drawn = [line for line in done.stdout.splitlines() if line.startswith("0.")]
    assert len(set(drawn)) == 2
    assert done.stdout.count("Forked") == 2


def test_threads_may_start_commands_at_the_same_time(tmp_path: Path) -> None:
    """Even while they all look up the server that they were given."""
    (tmp_path / "program.py").write_text("")
    program = f"""
import os, sys, threading
from pathlib import Path
from common.forked import start_python
sys.setswitchinterval(1e-6)
kinds, together, environment = [], threading.Barrier(16), dict(os.environ)
def begin():
    together.wait()
    process = start_python(["-m", "program"], environment=environment, output=1, directory=Path({str(tmp_path)!r}))
    kinds.append((type(process).__name__, process.wait()))
threads = [threading.Thread(target=begin) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert kinds == [("Forked", 0)] * 16, kinds
"""
    way, control = forked.way_to_server()
    for _ in range(3):
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **way}, pass_fds=control, check=True
        )


def test_a_command_has_no_descriptor_of_another(tmp_path: Path) -> None:
    """Even where the server's descriptors are numbered above those of the request."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    sleeper = "import time; time.sleep(60)"
    early = [begin(tmp_path / "a", sleeper) for _ in range(10)]
    late = [begin(tmp_path / "b", sleeper) for _ in range(10)]
    try:
        assert len({process.pid for process in (*early, *late)}) == 20
        for process in early:
            process.signal_group(signal.SIGKILL)
            process.wait(30)
        program = """
import os
for name in map("/proc/self/fd/{}".format, range(100)):
    if os.path.lexists(name):
        print(os.readlink(name))
"""
        assert begin(tmp_path, program).wait(30) == 0
        found = said(tmp_path).split()
    finally:
        for process in (*early, *late):
            process.signal_group(signal.SIGKILL)
            process.wait(30)
    assert len(found) == 4, found  # stdin, stdout, stderr, the channel to the server
    assert found[:3] == [os.devnull, *2 * [str(tmp_path / "output")]]


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
    # Tests of other devices may have left servers of their own.
    servers = [child for child in psutil.Process().children() if "common.fork_server" in " ".join(child.cmdline())]
    assert servers
    assert not any(server.children() for server in servers)
