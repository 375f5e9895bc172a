"""`python -m pipeline` alone prints one screen; an unknown word is answered with the nearest known one."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from pipeline.__main__ import COMMANDS
from tests.helpers.support import assert_one_line_error, command

LUIGI = ("-m", "luigi", "--module", "pipeline")


def test_alone_it_prints_one_screen_that_names_every_command() -> None:
    done = command("-m", "pipeline")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(re.search(rf"\b{name}\b", done.stdout) for name in COMMANDS)
    assert set(re.findall(r"-m pipeline ([a-z]+)", done.stdout)) <= set(COMMANDS)


def test_the_commands_and_tasks_on_the_map_are_taken() -> None:
    screen = command("-m", "pipeline").stdout
    known = set(re.findall(r"^class (\w+)\(", _sources("pipeline/tasks"), re.MULTILINE))
    tasks = set(re.findall(r"--module pipeline ([A-Z]\w+)", screen)) - {"TASK"}
    assert {"BertPhase2", "Nightly"} <= tasks <= known


def _sources(folder: str) -> str:
    return "".join(path.read_text() for path in Path(folder).resolve().rglob("*.py"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("statu",), "there is no command statu; did you mean status?"),
        (("qqq",), "there is no command qqq; allowed: init, doctor, status"),
        (("status", "--wach"), "unknown option --wach; did you mean --watch?"),
        (("why", "BertPhase2", "--phas", "1"), "unknown option --phas; did you mean --phase?"),
        (("status", "--Phase1-lrr", "1"), "unknown option --Phase1-lrr; did you mean --Phase1-lr?"),
        (("status", "--Phase1-lr"), "argument --Phase1-lr: expected one argument"),
        (("why", "Pretrain", "--phase", "x"), "argument --phase: invalid int value: 'x'; see --help"),
        (("--Phase1-lr", "5e-4"), "the following arguments are required: COMMAND; see --help"),
    ],
)
def test_an_unknown_word_of_ours_is_one_line(words: tuple[str, ...], line: str) -> None:
    assert_one_line_error(command("-m", "pipeline", *words), line, status=2)


@pytest.mark.parametrize(
    ("words", "line", "status"),
    [
        (("BertPhas2",), "there is no task BertPhas2; did you mean BertPhase2?", 35),
        (("Phase1",), "there is no task Phase1; did you mean BertPhase1?", 35),
        (("BertPhase2", "--Phase2-warmup-step", "1"), "did you mean --Phase2-warmup-steps?", 2),
        (("Pretrain", "--phse", "1"), "unknown option --phse; did you mean --phase?", 2),
        (("Pretrain",), "Pretrain needs --phase; give it", 35),
        (("Pretrain", "--phase", "one"), "Pretrain: invalid literal", 35),
        (("Nightly", "--date", "tonight"), "Nightly: ", 35),
        (("BertPhase2", "--Zzz", "1"), "unknown option --Zzz; see --help", 2),
    ],
)
def test_an_unknown_word_of_luigis_is_one_line(words: tuple[str, ...], line: str, status: int) -> None:
    assert_one_line_error(command(*LUIGI, *words), line, status=status)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        ("KeyboardInterrupt", 130, "interrupted"),
        ("OSError(98, 'Address already in use')", 35, "error: Address already in use"),
        ("OSError('no answer')", 35, "error: no answer"),
        ("OSError(13, 'Not allowed', '/a')", 35, "error: cannot read /a: Not allowed; check its permissions"),
    ],
)
def test_ctrl_c_and_a_call_that_failed_are_one_line(error: str, status: int, line: str) -> None:
    program = (
        "import sys; from pipeline.__main__ import COMMANDS, main\n"
        f"def fail(args): raise {error}\n"
        "COMMANDS['completion'].run = fail; sys.exit(main(['completion', 'bash']))"
    )
    done = command("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"{line}\n")


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = command("-m", "pipeline", "luigid", "--port", str(port), "--Run-work-dir", str(tmp_path))
    assert_one_line_error(done, f"cannot listen on 127.0.0.1, port {port}: Address already in use", status=35)


def test_options_of_luigi_are_still_taken() -> None:
    assert command("-m", "pipeline", "status", "--json", "--scheduler-port", "1").returncode == 0
