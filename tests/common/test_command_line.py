"""Command lines are refused in one line."""

from __future__ import annotations

import pytest

from common.command_line import Parser, port
from tests.helpers.support import assert_one_line_error, command


@pytest.fixture
def parser() -> Parser:
    p = Parser()
    p.add_argument("--source", required=True)
    p.add_argument("--seed", type=int)
    p.add_argument("--port", type=port(1))
    return p


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: --source; see --help"),
        (["--sorce", "x"], "unknown option --sorce; did you mean --source?"),
        (["--source", "x", "--quux"], "unknown option --quux; see --help"),
        (["--sour", "x"], "unknown option --sour; did you mean --source?"),
        (["--source", "x", "--seed", "y"], "argument --seed: invalid int value: 'y'; see --help"),
        (["--source", "x", "--port", "99999"], "argument --port: 99999 is not a port; allowed: 1 to 65535; see --help"),
        (["--source", "x", "--port", "0"], "argument --port: 0 is not a port; allowed: 1 to 65535; see --help"),
        (["--source", "x", "--port=-1"], "argument --port: -1 is not a port; allowed: 1 to 65535; see --help"),
    ],
)
def test_one_line_says_what_is_wrong(
    parser: Parser, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_what_is_right_is_taken(parser: Parser) -> None:
    given = parser.parse_args(["--source=x", "--seed", "3", "--port", "65535"])
    assert vars(given) == {"source": "x", "seed": 3, "port": 65535}
    assert port(0)("0") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer", "--data_dir", "x", "--lrr", "4"], "unknown option --lrr; did you mean --lr?"),
        (["stages.tokenize", "--sorce", "builtin"], "unknown option --sorce; did you mean --source?"),
        (["stages.sync", "--work-dir=x"], "the following arguments are required: push|pull; see --help"),
        (["pipeline", "store", "verify", "--rad"], "unknown option --rad; did you mean --read?"),
    ],
)
def test_all_commands_do(words: list[str], said: str) -> None:
    assert_one_line_error(command("-m", *words), said, status=2)
