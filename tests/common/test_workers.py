"""Work in processes: results in order, however the processes are started; nothing left behind."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.errors import UserError
from common.workers import Workers


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def refuse(number: int) -> int:
    if number == 3:
        raise UserError("three is refused")
    return number


START = """
import multiprocessing, sys, threading
from common.workers import Workers
done = threading.Event()
if sys.argv[1] == "True":
    threading.Thread(target=done.wait).start()
with Workers(2):
    print({type(process).__name__ for process in multiprocessing.active_children()})
done.set()
"""


@pytest.mark.parametrize(("with_thread", "methods"), [(False, {"ForkProcess"}), (True, {"SpawnProcess"})])
def test_processes_are_forked_unless_there_is_a_thread(with_thread: bool, methods: set[str]) -> None:
    """Run in a process of its own, as libraries that other tests use leave threads in this one."""
    found = subprocess.run([sys.executable, "-c", START, str(with_thread)], capture_output=True, text=True, check=True)
    assert ast.literal_eval(found.stdout) == methods, found.stderr


def test_results_are_in_order_and_from_so_many_processes() -> None:
    with Workers(2) as workers:
        found = list(workers.map(square, range(200)))
        again = list(workers.map(square, range(3)))
    assert [value for value, _ in found] == [n * n for n in range(200)]
    assert [value for value, _ in again] == [0, 1, 4]
    used = {process for _, process in found}
    assert 1 <= len(used) <= 2
    assert os.getpid() not in used
    assert not multiprocessing.active_children()


def test_one_process_is_this_one() -> None:
    with Workers(1) as workers:
        assert list(workers.map(square, [7])) == [(49, os.getpid())]


def test_tasks_are_read_only_so_far_ahead() -> None:
    read = 0

    def tasks() -> Iterator[int]:
        nonlocal read
        for read in range(1000):  # noqa: UP028 (`read` is nonlocal)
            yield read

    with Workers(2) as workers:
        next(workers.map(square, tasks()))
        assert read < 10


def test_what_goes_wrong_in_a_worker_is_raised_here() -> None:
    with pytest.raises(UserError, match="three is refused"), Workers(2) as workers:
        list(workers.map(refuse, range(10)))
    with pytest.raises(UserError, match="a worker process died"), Workers(2) as workers:
        list(workers.map(die, range(10)))
    assert not multiprocessing.active_children()
