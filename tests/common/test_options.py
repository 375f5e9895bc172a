"""Options as fields: the parser, the checks and the command line made from a dataclass agree."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.options import add_options, check, deciding, from_namespace, option, words
from common.secrets import SECRETS_VARIABLE, Secret, hidden_words


@dataclass(frozen=True, kw_only=True)
class Options:
    source: Secret = option(names=("source",), metavar="IN", help="where from")
    more: tuple[Path, ...] = option((), names=("more",), help="more of them")
    seq_len: int = option(help="tokens in a row", unit="tokens", least=8, most=512)
    share: float = option(0.5, help="100 % at most", least=0, most=1)
    kind: str = option("a", choices=("a", "b"), help="which")
    pack: bool = option(False, help="several in a row", omit_default=True)
    lower_case: bool = option(True, help="uncased")
    shards: int | None = option(None, help="files", least=1)
    texts: tuple[str, ...] = option((), names=("--text",), help="a text", decides=False)
    allow: tuple[str, ...] = option((), names=("--allow",), nargs="+", help="names", decides=False)
    endpoint: Secret = option(Secret(""), help="a server", decides=False, group="network")
    phase: int = option(1, names=None, help="not on the command line", decides=False)

    def __post_init__(self) -> None:
        check(self)


def parsed(*given: str) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser, Options)
    return from_namespace(Options, parser.parse_args(given))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"more": (Path("a"), Path("b c")), "share": 0.1, "kind": "b", "pack": True, "lower_case": False, "shards": 3},
        {"texts": ("-x", "y z"), "allow": ("lr", "seed"), "endpoint": Secret.address("http://user:password@host")},
        {"share": 1e-7},
    ],
    ids=str,
)
def test_the_command_line_of_options_makes_them_again(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(source=Secret.address("s3://bucket/a.tar"), seq_len=128, **changes)
    line = words(options)
    monkeypatch.setenv(SECRETS_VARIABLE, hidden_words(line).get(SECRETS_VARIABLE, "{}"))
    assert parsed(*map(str, line)) == options
    assert "password" not in " ".join(line)


def test_values_at_their_defaults_are_left_out() -> None:
    assert words(Options(source=Secret.address("in"), seq_len=128)) == ["in", "--seq-len=128"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--seq-len=7", "--seq-len is 7; allowed: a whole number from 8 to 512"),
        ("--seq-len=1e2", "--seq-len is 1e2; allowed: a whole number from 8 to 512"),
        ("--share=nan", "--share is nan; allowed: a number from 0 to 1"),
        ("--shards=0", "--shards is 0; allowed: a whole number 1 or more"),
        ("--kind=c", "--kind is c; allowed: a, b"),
    ],
)
def test_a_bad_value_is_one_line(given: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        parsed("in", "--seq-len=8", given)
    assert str(error.value) == line


def test_a_value_that_the_program_sets_is_checked_too() -> None:
    with pytest.raises(UserError, match="--seq-len is 1000"):
        Options(source=Secret.address("in"), seq_len=1000)


def test_what_decides_is_in_the_identity_and_an_option_added_later_only_if_it_is_given() -> None:
    options = Options(source=Secret.address("in"), seq_len=8)
    decides = {"source": "in", "more": (), "seq_len": 8, "share": 0.5, "kind": "a", "lower_case": True, "shards": None}
    assert deciding(options) == decides
    assert deciding(dataclasses.replace(options, pack=True, texts=("x",))) == {**decides, "pack": True}


def test_the_help_names_unit_default_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("--seq-len TOKENS", "100 % at most (0.5)", "--kind {a,b}", "--pack, --no-pack", "network:"):
        assert part in shown, part
    assert "phase" not in shown
