"""Nights on disk: a work directory WORK/nights/<date> for each, and <date>.json once it is complete."""

from __future__ import annotations

import configparser
import datetime
import functools
import glob
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from luigi.configuration import get_config
from luigi.interface import core

from common.addresses import local_path, url_scheme
from common.console import log
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, failpoint, read_json, sweep_temporaries, write_json
from common.secrets import Secret, address_identity
from pipeline.settings.load import SECRETS_VARIABLE
from pipeline.settings.sections import PREVIOUS, SECTIONS, Nights, Settings, section_name
from pipeline.status.stage_dirs import holder
from pipeline.tasks.nights import records, start_from
from pipeline.tasks.nights.start_from import CONFIG
from stages.text.patterns import split

LATEST = "latest"
#: Settings that name input files: those of a night must be there when it starts.
_INPUTS = {
    "run": ("start_from",), "corpus": ("source", "held_out_source", "vocab_file"), "phase2": ("start_from",),
    "dataset": ("phase1_url", "phase2_url"), "evaluation": ("blimp",), "mnist": ("url",),
}  # fmt: skip
#: Luigi's own sections that a night's chain inherits. Not the mail sections: the night itself sends mail.
_LUIGI_SECTIONS = ("core", "worker", "scheduler", "resources", "retcode", "logging", "execution_summary")


class NightDirs:
    """All nights of a work directory. A night's record outlives its directory: the night stays complete."""

    def __init__(self, settings: Settings) -> None:
        self.path = settings.work_dir.absolute() / "nights"
        self._settings = settings

    def directory(self, date: datetime.date) -> Path:
        return self.path / date.isoformat()

    def is_complete(self, date: datetime.date) -> bool:
        return read_json(self._record(date.isoformat())) is not None

    def _record(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def require_startable(self, date: datetime.date) -> None:
        """Raise `UserError` if an input is missing, or the night cannot continue the one that it would."""
        cluster = self._settings.cluster
        if cluster.launcher == "local" and cluster.nnodes > 1:
            raise UserError(
                f"[cluster] nnodes is {cluster.nnodes} with launcher local, and a night is started on one machine; "
                f"allowed: nnodes 1, or launcher slurm or kubernetes"
            )
        require_inputs(self._settings, date)
        given = self._settings.nights
        if given.start_from:
            start_from.require_possible(self._settings)
            if not self.is_complete(date):
                night, accepted = self.directory(date), self._accepted_before(date)
                start_from.require_agreement(self._settings, _texts(self._settings, date), night, accepted)
        elif given.gate_tolerance is not None:
            raise UserError(
                f"[nights] gate_tolerance = {given.gate_tolerance} compares losses on the same held-out text, which "
                f"nights share only with start_from = {PREVIOUS}; set that, or leave gate_tolerance empty"
            )

    def _accepted_before(self, date: datetime.date) -> list[Path]:
        """The directories of accepted nights before `date`, newest first."""
        return [self.path / name for name in self._accepted() if name < date.isoformat()]

    def prepare(self, date: datetime.date) -> dict[str, str]:
        """Create the night's directory and settings, with what it takes over from an earlier night; returns the
        environment of its chain. Raises `DiskError`."""
        directory = self.directory(date)
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            link = directory / "tensorboard"  # one TensorBoard shows all nights
            if not link.is_symlink():
                link.symlink_to(Path("../../tensorboard"))
            parent = None
            if self._settings.nights.start_from:
                agrees = functools.partial(start_from.require_candidate, self._settings, _texts(self._settings, date))
                parent = start_from.take_over(directory, self._accepted_before(date), agrees)
            config, hidden = _config(self._settings, date, directory, start_from.overrides(parent))
            with (directory / CONFIG).open("w", encoding="utf-8") as file:
                file.write(
                    "# Without logins and signatures of addresses: a night gets them from the process that starts it.\n"
                )
                config.write(file)
        return {"LUIGI_CONFIG_PATH": str(directory / CONFIG), SECRETS_VARIABLE: json.dumps(hidden)}

    def record(self, date: datetime.date, facts: dict[str, Any]) -> None:
        """Move `latest` to the newest accepted night, then record that the night is complete: if killed in between, it
        is started again and does both. Raises `DiskError`."""
        accepted = set(self._accepted()) - {date.isoformat()}
        if records.is_accepted(facts):
            accepted.add(date.isoformat())
        temporary = self.path / f"{LATEST}{TEMPORARY_SUFFIX}"
        failpoint(f"latest-before:{date}")
        if accepted:
            with disk_errors(temporary):
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(max(accepted))
                temporary.replace(self.path / LATEST)
        failpoint(f"latest-after:{date}")
        write_json(self._record(date.isoformat()), facts)

    def _accepted(self) -> list[str]:
        """Those of `_complete` that no gate has rejected."""
        found = {name: records.read(self._record(name)) or {} for name in self._complete()}
        return [name for name, record in found.items() if records.is_accepted(record)]

    def _complete(self) -> list[str]:
        """Complete nights whose directories exist, newest first. Future dates, which come from mistakes and wrong
        clocks, are left out."""
        last = last_allowed().isoformat()
        complete = (path.name for path in self._directories() if read_json(self._record(path.name)) is not None)
        return sorted((name for name in complete if name <= last), reverse=True)

    def others(self, date: datetime.date) -> list[Path]:
        """The directories of all other nights, newest first."""
        return sorted((path for path in self._directories() if path != self.directory(date)), reverse=True)

    def _directories(self) -> Iterator[Path]:
        for path in self.path.glob("*"):  # nothing before the first night
            if path.is_dir() and not path.is_symlink() and _is_date(path.name):
                yield path

    def prune(self, current: datetime.date) -> None:
        """Remove nights older than the newest `keep` complete ones, except `current`, `latest` and those in use.

        Raises `DiskError`.
        """
        keep = self._settings.nights.keep
        complete = self._complete()
        if len(complete) < keep:
            return
        with disk_errors(self.path):
            sweep_temporaries(self.path)
            for path in sorted(self._directories()):
                if path.name >= complete[keep - 1] or path.name in (current.isoformat(), *self._accepted()[:1]):
                    continue
                # Skip links: `tensorboard` is shared by all nights.
                if any(holder(stage) for stage in path.iterdir() if not stage.is_symlink()):
                    log(f"night {path.name}: kept, as it is in use")
                    continue
                doomed = path.with_name(path.name + TEMPORARY_SUFFIX)
                path.rename(doomed)
                shutil.rmtree(doomed)
                log(f"night {path.name}: removed, as {keep} newer {'one is' if keep == 1 else 'are'} complete")


def date_of(text: str) -> datetime.date:
    """The night that a command's --date names. Raises `UserError`."""
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise UserError(f"--date {text} is not allowed; allowed: a date, such as 2026-11-21") from None


def last_allowed() -> datetime.date:
    """Tomorrow: in other time zones it may have begun."""
    return datetime.date.today() + datetime.timedelta(days=1)


def require_inputs(settings: Settings, date: datetime.date) -> None:
    """Raise `UserError` if an input file with the date in its name is missing, or if the date is in the future.

    A night with a future date would count as the newest one until that date.
    """
    if date > last_allowed():
        raise UserError(f"night {date} is in the future; allowed: up to {last_allowed()}; nothing was started")
    texts, dated_texts = _texts(settings), _texts(settings, date)
    for section, keys in _INPUTS.items():
        for key in keys:
            text, dated = texts[section][key], dated_texts[section][key]
            patterns = split(dated) if key in ("source", "held_out_source") else [dated]
            for pattern in patterns if dated != text else ():
                if url_scheme(pattern) not in ("", "file"):
                    continue
                path = local_path(pattern)
                if not (path.exists() or glob.glob(str(path), recursive=True)):
                    raise UserError(f"night {date}: [{section}] {key}: {path} matches no file; nothing was started")


def names_date(settings: Settings) -> bool:
    """Whether a setting has a placeholder for the date."""
    return bool(overlay_of(settings, datetime.date.min))


def overlay_of(settings: Settings, date: datetime.date) -> dict[str, dict[str, str]]:
    """The settings that name the date, with it filled in."""
    before, after = _texts(settings), _texts(settings, date)
    changed = {
        section: {key: text for key, text in values.items() if text != before[section][key]}
        for section, values in after.items()
    }
    return {section: {key: text.reveal() if isinstance(text, Secret) else text for key, text in values.items()}
            for section, values in changed.items() if values}  # fmt: skip


def _texts(settings: Settings, date: datetime.date | None = None) -> dict[str, dict[str, str]]:
    """All settings of the chain by section and key, as text for luigi.cfg; with `date` filled in where they name it."""
    sections = {section_name(section): section for section in SECTIONS if section is not Nights}
    texts = {
        name: {key: _text(getattr(getattr(settings, name), key)) for key, _ in section.get_params()}
        for name, section in sections.items()
    }
    if date is None:
        return texts
    return {name: {key: _dated(text, date) for key, text in values.items()} for name, values in texts.items()}


def _dated(text: str, date: datetime.date) -> str:
    if isinstance(text, Secret):
        return Secret.address(_dated(text.reveal(), date))
    parts = {"date": date.isoformat(), "year": f"{date:%Y}", "month": f"{date:%m}", "day": f"{date:%d}"}
    for name, value in parts.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _text(value: object) -> str:
    return value if isinstance(value, Secret) else "" if value is None else str(value)


def _is_date(name: str) -> bool:
    try:
        return datetime.date.fromisoformat(name).isoformat() == name
    except ValueError:
        return False


def _config(
    settings: Settings, date: datetime.date, directory: Path, overrides: Mapping[str, Mapping[str, str]]
) -> tuple[configparser.ConfigParser, dict[str, dict[str, str]]]:
    """A night's settings, changed by `overrides`, and luigi's own; second, the values that hide secrets, by section and
    key.

    The written file holds only the identity of a secret address, which is enough for `status` and `why`.
    """
    given = get_config()
    sections = {section: dict(given.items(section)) for section in _LUIGI_SECTIONS if given.has_section(section)}
    names = ("local_scheduler", "scheduler_host", "scheduler_port", "scheduler_url", "log_level")
    sections.setdefault("core", {}).update({name: _text(getattr(core(), name)) for name in names})
    for section, values in _texts(settings, date).items():
        sections[section] = {**values, **overrides.get(section, {})}
    sections["run"]["work_dir"] = str(directory)
    sections["email"] = {"format": "none"}
    config, hidden = configparser.ConfigParser(interpolation=None), dict[str, dict[str, str]]()
    for section, values in sections.items():
        config[section] = {}
        for key, value in values.items():
            secret = value if isinstance(value, Secret) else Secret.address(value)
            whole = secret.reveal()
            if secret.hides:
                hidden.setdefault(section, {})[key] = whole
            config[section][key] = (address_identity(whole) if secret.hides else whole).replace("%", "%%")
    return config, hidden
