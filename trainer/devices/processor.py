"""What the operating system says of the processor."""

from __future__ import annotations

from pathlib import Path


def info() -> dict[str, str]:
    """What Linux reports of the first core, by field; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except FileNotFoundError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def flags() -> set[str]:
    """The features of the first core; empty where they are not known."""
    return set(info().get("flags", "").split())
