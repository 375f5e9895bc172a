"""What there is of a download under way: download.part has the bytes, download.json says which of them are there."""

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
    """What download.json says."""

    url: str
    version: Version
    #: What is there: ascending ranges [start, stop).
    have: list[Span]
    #: Whether what came of it was refused, so that the object is looked at again before it is used again.
    refused: bool = False

    @classmethod
    def read(cls, directory: Path) -> State | None:
        record = read_json(directory / STATE)
        if record is None:
            return None
        have = [(int(start), int(stop)) for start, stop in record["have"]]
        return cls(record["url"], Version(**record["version"]), have, record["refused"])

    def write(self, directory: Path) -> None:
        """Durably; raises `DiskError`."""
        write_json(directory / STATE, asdict(self))

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.have)


def joined(spans: list[Span]) -> list[Span]:
    """The same bytes in as few ascending ranges as can be."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
