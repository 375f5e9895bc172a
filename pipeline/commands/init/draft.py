"""A settings file being drafted: values and comments from the project's files, where they differ from the defaults."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pipeline.settings.config_file import Entry, by_section, project_file
from pipeline.settings.sections import SECTIONS, section_name

_SECTIONS = {section_name(section): section for section in SECTIONS}
_WIDTH = 118


class Draft:
    """Values by section and key, each with its comment."""

    def __init__(self) -> None:
        self._defaults = _keys("luigi.cfg")
        self._values: dict[tuple[str, str], str] = {}
        self._comments: dict[tuple[str, str], tuple[str, ...]] = {}
        #: Keys to write even at their defaults.
        self._kept: set[tuple[str, str]] = set()

    def take(self, name: str, *sections: str) -> None:
        """Take over the settings of one of the project's configurations, or those of some of its sections."""
        for (section, key), entry in _keys(name).items():
            if not sections or section in sections:
                self._values[section, key] = entry.value
                self._comments[section, key] = entry.comment

    def take_one(self, name: str, section: str, key: str) -> None:
        """Take over one setting of a configuration, or its default if it has none."""
        entry = _keys(name).get((section, key))
        self.drop(section, key)
        if entry is not None:
            self._values[section, key], self._comments[section, key] = entry.value, entry.comment

    def set(self, section: str, key: str, value: object, why: str = "") -> None:
        """Set a value for this machine. `why` is its comment; empty: that of luigi.cfg."""
        assert (section, key) in self._defaults, (section, key)
        self._values[section, key] = str(value)
        self._comments[section, key] = (why,) if why else ()

    def keep(self, section: str, *keys: str) -> None:
        """Write these keys, whatever their values: a person will most likely change them."""
        self._kept |= {(section, key) for key in keys}

    def drop(self, section: str, *keys: str) -> None:
        """Leave these at their defaults."""
        for key in keys:
            self._values.pop((section, key), None)

    def value(self, section: str, key: str) -> Any:
        """The value as the pipeline reads it."""
        return self._parsed(section, key, self.text(section, key))

    def text(self, section: str, key: str) -> str:
        return self._values.get((section, key), self._defaults[section, key].value)

    def fit_batches(self) -> None:
        """Choose micro-batches that divide the global batches among the workers; a global batch that cannot be divided
        becomes the nearest one that can."""
        copies = self.value("cluster", "nnodes") * self.value("cluster", "nproc_per_node")
        copies //= self.value("cluster", "tensor_parallel_size")
        for section in ("phase1", "phase2"):
            whole, micro = (self.value(section, key) for key in ("global_batch_size", "micro_batch_size"))
            fits = [size for size in range(micro, 0, -1) if whole % (size * copies) == 0]
            why = ""
            if fits:
                size = fits[0]
            else:
                size = micro
                why = f" ({whole} cannot be divided among {copies})"
                whole = max(1, round(whole / (size * copies))) * size * copies
            if size != micro:
                self.set(section, "micro_batch_size", size)
            if (section, "global_batch_size") in self._values or why:
                steps = whole // (size * copies)
                self.set(
                    section, "global_batch_size", whole,
                    f"Rows in one optimizer step: {size} rows × {steps} micro-steps × {copies} workers{why}",
                )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The sections, in luigi.cfg's order."""
        section = ""
        for at, default in self._defaults.items():
            value = self._values.get(at, default.value)
            if at not in self._kept and self._parsed(*at, value) == self._parsed(*at, default.value):
                continue
            if at[0] != section:
                section = at[0]
                yield from ("", f"[{section}]")
            for line in self._comment(*at):
                yield f"# {line}"
            first, *rest = value.split("\n")
            yield f"{at[1]} = {first}".rstrip()
            yield from (f"  {line}" for line in rest)

    def _comment(self, section: str, key: str) -> list[str]:
        """The comment that came with the value; else luigi.cfg's, which explains phase 2's keys in phase 1."""
        given = " ".join(self._comments.get((section, key), ()))
        places = [
            (section, key),
            *([("phase1", key)] if section == "phase2" and ("phase1", key) in self._defaults else []),
        ]
        explained = (" ".join(self._defaults[place].comment) for place in places)
        about = next((text for each in explained if (text := _without_tutorial(each))), "")
        return textwrap.wrap(given or about, _WIDTH)

    @staticmethod
    def _parsed(section: str, key: str, text: str) -> Any:
        return dict(_SECTIONS[section].get_params())[key].parse(text)


def _without_tutorial(comment: str) -> str:
    """A comment of luigi.cfg up to the value that AWS's tutorial has."""
    return re.split(r"\s*\btutorial:", comment)[0]


def _keys(name: str) -> dict[tuple[str, str], Entry]:
    """The settings of one of the project's files, by section and key."""
    found = by_section(project_file(name).read_text(encoding="utf-8"))
    return {(section, key): entry for section, keys in found.items() if section in _SECTIONS
            for key, entry in keys.items()}  # fmt: skip
