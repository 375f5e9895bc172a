"""The options of a stage: what its command takes, what luigi fills from the settings, what identifies the result."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from common.command_line import Parser
from common.hashing import InputHashes
from common.options import add_options, check, deciding, from_namespace, kind_of, option, words
from common.secrets import Secret
from stages.directory.manifest import Identity, why_incomplete
from stages.directory.records import read_manifest

T = TypeVar("T", bound="StageOptions")


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Base of every stage's options. Importable without torch, numpy and h5py, because the pipeline imports it.

    Raises `UserError` for a value that is not allowed.
    """

    #: `python -m` runs it.
    module: ClassVar[str]
    stage: ClassVar[str]
    #: Increased when the same options would give a different result.
    format_version: ClassVar[int] = 1
    #: Whether the stage directory is the last positional argument, OUT, rather than --out.
    out_is_positional: ClassVar[bool] = False
    #: argparse's nargs and help for the stage directory.
    out_nargs: ClassVar[str | None] = None
    out_help: ClassVar[str] = "stage directory to create or resume"

    def __post_init__(self) -> None:
        check(self)

    def identity(self, hashes: InputHashes | None = None, upstream: Mapping[str, str] | None = None) -> Identity:
        """What identifies the result: the same whether luigi or a person starts the stage.

        `upstream`: fingerprints of the stages whose directories are inputs, by role; they need not be made yet. None:
        read from those directories. Raises `UserError` for inputs that cannot be read.
        """
        upstream = self.upstream() if upstream is None else upstream
        return Identity(
            stage=self.stage,
            format_version=self.format_version,
            phase=getattr(self, "phase", None),
            parameters=self.parameters(),
            inputs=self.inputs(hashes or InputHashes(), upstream),
            upstream=dict(upstream),
        )

    def parameters(self) -> dict[str, Any]:
        """The values that decide the result. Paths and addresses do not; the content behind them does (`inputs`)."""
        return {name: v for name, v in deciding(self).items() if kind_of(type(self), name)[0] not in (Path, Secret)}

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        """The content of inputs that are not stage directories, whatever their paths. Raises `UserError`."""
        return {}

    def upstream(self) -> dict[str, str]:
        """The fingerprints of inputs that are directories of complete stages, by role. Raises `UserError`."""
        return {}

    def words(self, out: Path) -> list[str]:
        """The command that fills `out`, as arguments of the Python interpreter."""
        if self.out_is_positional:
            return ["-m", self.module, *words(self, str(out))]
        return ["-m", self.module, *words(self), f"--out={out}"]


@dataclass(frozen=True, kw_only=True)
class BuildOptions(StageOptions):
    """Options of a stage that several processes make, on one machine or on several."""

    processes: int = option(
        0, least=0, decides=False, help="worker processes; 0: one per core; does not affect the output"
    )
    builders: int = option(
        1, least=1, most=4096, unit="machines", decides=False, omit_default=True,
        help="machines that fill --out together, each started with its rank, from 0, in the variable PET_NODE_RANK; "
        "does not affect the output",
    )  # fmt: skip


def fingerprints(**directories: Path | None) -> dict[str, str]:
    """The fingerprints of those `directories` that hold complete stages."""
    found = {}
    for role, directory in directories.items():
        manifest = read_manifest(directory) if directory is not None else None
        if directory is not None and manifest is not None:
            fingerprint: str = manifest["fingerprint"]
            if why_incomplete(directory, fingerprint) is None:
                found[role] = fingerprint
    return found


def stage_parser(cls: type[StageOptions], description: str | None) -> argparse.ArgumentParser:
    """The parser of a stage's command, made from its options."""
    p = Parser(
        prog=f"python -m {cls.module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(p, cls)
    if cls.out_is_positional:
        p.add_argument("out", type=Path, nargs=cls.out_nargs, metavar="OUT", help=cls.out_help)
    else:
        p.add_argument("--out", type=Path, required=True, metavar="DIR", help=cls.out_help)
    return p


def parse(cls: type[T], parser: argparse.ArgumentParser) -> tuple[T, Path]:
    """The options on this process's command line, and the stage directory to fill. Raises `UserError`."""
    args = parser.parse_args()
    return from_namespace(cls, args), args.out
