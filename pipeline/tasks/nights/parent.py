"""What a night takes over from the night that it continues, in a folder of its own, which pruning leaves alone.

parent/
    parent.json               the night, what must stay the same, and the sha256 of the files below; written last
    checkpoint/ckpt_<step>/   hard links to the last checkpoint before the learning rate's decay
    vocab.txt
    held_out/                 the chain's held-out examples
    held_out_tokens/          the documents that they are made of, which are never trained on
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import read_json
from common.hashing import InputHashes
from pipeline.settings.sections import Settings
from pipeline.tasks.input_hashes import input_hashes
from trainer.checkpoint.directory import MANIFEST

#: Folder in a night's directory, and its record.
PARENT, RECORD = "parent", "parent.json"
VOCABULARY, HELD_OUT, HELD_OUT_TOKENS, CHECKPOINT = "vocab.txt", "held_out", "held_out_tokens", "checkpoint"


@dataclass(frozen=True)
class Parent:
    """The folder of a night that continues another."""

    directory: Path
    record: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> Parent | None:
        """None if the night was begun without a parent. Raises `UserError` if there is no such folder."""
        record = read_json(directory / RECORD)
        if record is None:
            raise UserError(
                f"[run] start_from = {directory}: there is no {RECORD}; nights make this folder and set this (docs/"
                f"overnight.md): run the night again, or else leave it empty"
            )
        return cls(directory, record) if record["night"] else None

    @property
    def night(self) -> str:
        return str(self.record["night"])

    @property
    def checkpoint(self) -> Path:
        return self.directory / CHECKPOINT / str(self.record["checkpoint"])

    @property
    def vocabulary(self) -> Path:
        return self.directory / VOCABULARY

    @property
    def held_out(self) -> Path:
        return self.directory / HELD_OUT

    @property
    def held_out_tokens(self) -> Path:
        return self.directory / HELD_OUT_TOKENS

    @property
    def identity(self) -> dict[str, str]:
        """The night, and the content of its checkpoint: the sha256 of the manifest, which has those of its files."""
        return {
            "night": self.night,
            "checkpoint": self.record["sha256"][str((self.checkpoint / MANIFEST).relative_to(self.directory))],
        }

    def require_unaltered(self, hashes: InputHashes) -> None:
        """Raise `UserError` if a file is not what was taken over."""
        for name, sha256 in self.record["sha256"].items():
            if hashes.sha256(self.directory / name) != sha256:
                raise UserError(
                    f"{self.directory / name} has been altered since it was taken over from night {self.night}; remove "
                    f"{self.directory.parent} and run the night again"
                )


def parent_of(settings: Settings) -> Parent | None:
    """The night that [run] start_from names, its files checked; None: phase 1 starts with initial weights.

    Raises `UserError`.
    """
    parent = Parent.read(Path(settings.run.start_from)) if settings.run.start_from else None
    if parent is not None:
        parent.require_unaltered(input_hashes(settings.work_dir))
    return parent
