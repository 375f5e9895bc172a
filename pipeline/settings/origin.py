"""Where a setting was given: on the command line, or in which line of which settings file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from luigi.cmdline_parser import CmdlineParser
from luigi.configuration import get_config

from common.errors import UserError
from pipeline.settings.config_file import Entry, entries
from pipeline.settings.sections import SECTIONS, section_name

COMMAND_LINE = "the command line"
#: In a message: a section, a key right after it, a key with its value, and what can only be a key.
_NAMED = re.compile(
    r"\[(?P<section>\w+)\](?: (?P<first>[A-Za-z]\w*))?|\b(?P<key>[A-Za-z]\w*(?= =)|[a-z]+(?:_[a-z0-9]+)+)\b"
)


def place(section: str, key: str = "") -> str | None:
    """Where the value of a setting comes from, or without `key` where a section is: `my.cfg:12` or `COMMAND_LINE`.
    None: nobody gave it, so it is the project's default."""
    parser = CmdlineParser.get_instance()
    family = {section_name(one): one.__name__ for one in SECTIONS}.get(section)
    if key and parser is not None and family is not None:
        # While luigi's parser is being made it has no arguments yet.
        given = getattr(parser, "known_args", None)
        if getattr(given, f"{family}_{key}", None) is not None:
            return COMMAND_LINE
    for path in reversed(list(map(Path, get_config()._config_paths))):
        if not path.is_file():
            continue
        lines = [entry.line for entry in _read(path) if (entry.section, entry.key) == (section, key)]
        if lines:
            return f"{path}:{lines[-1]}"
    return None


def commented_line(section: str, key: str, prefix: str) -> int | None:
    """The number of a line below a key's, in the last file that has it, that seems to continue its value but begins
    with `prefix`, which makes it a comment."""
    where = place(section, key)
    if where in (None, COMMAND_LINE):
        return None
    path, _, at = str(where).rpartition(":")
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines()[int(at) :], start=int(at) + 1):
        if line.strip() and not line[0].isspace():
            return None
        if line.strip().startswith(prefix):
            return number
    return None


def placed(message: str) -> str:
    """`message`, and where the settings that it names were given."""
    found: dict[str, str | None] = {}
    section = ""
    for match in _NAMED.finditer(message):
        section = match["section"] or section
        key = match["first"] or match["key"]
        if key and section and _is_setting(section, key):
            found.setdefault(key, place(section, key))
        elif match["section"] and not found:
            found[""] = place(section)
    if len(found) > 1:
        found.pop("", None)
    given = {key: where for key, where in found.items() if where is not None}
    if not given:
        return message
    names = len(found) > 1
    said = f" ({', '.join(f'{key}: {where}' if names else where for key, where in given.items())})"
    return message.removesuffix(said) + said


@contextlib.contextmanager
def named_places(*, overlaid: bool = False) -> Iterator[None]:
    """Add to a `UserError` of the block where the settings that it names were given. `overlaid`: the block uses the
    settings of a sweep's trial, not this process's, so nothing is added."""
    try:
        yield
    except UserError as error:
        if not overlaid:
            error.args = (placed(str(error)),)
        raise


def _is_setting(section: str, key: str) -> bool:
    """Whether the section has or was given such a key."""
    return bool(get_config().has_option(section, key))


def _read(path: Path) -> Iterator[Entry]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # luigi has read it, or said why not
        return iter(())
    return entries(text)
