"""State of a partial download: download.part holds the bytes, download.json the ranges that are complete."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import read_json, write_json
from stages.transfer.remote import Version

PART = "download.part"
STATE = "download.json"

Span = tuple[int, int]


@dataclass(frozen=True)
class State:
    """The content of download.json."""

    url: str
    version: Version
    #: Downloaded ranges [start, stop), ascending.
    have: list[Span]
    #: Whether the downloaded file was rejected; the object's version is then checked again before the file is used.
    refused: bool = False

    @classmethod
    def read(cls, directory: Path) -> State | None:
        record = read_json(directory / STATE)
        if record is None:
            return None
        have = [(int(start), int(stop)) for start, stop in record["have"]]
        return cls(record["url"], Version(**record["version"]), have, record["refused"])

    def write(self, directory: Path) -> None:
        """Write the state durably; raises `DiskError`."""
        write_json(directory / STATE, asdict(self))

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.have)


def joined(spans: list[Span]) -> list[Span]:
    """Merge adjacent ranges; ascending."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
