"""The only reader of luigi.cfg; checks that every setting is known, typed and in range.

The defaults are the luigi.cfg of this project. The user's own luigi.cfg, LUIGI_CONFIG_PATH and the command line
(`--Phase1-lr 1e-3`) override it. Each section is a luigi Config.
"""

from __future__ import annotations

import configparser
import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import luigi
from luigi.configuration import get_config
from luigi.configuration.cfg_parser import InterpolationMissingEnvvarError
from luigi.freezing import recursively_freeze
from luigi.parameter import MissingParameterException
from luigi.task_register import Register

from common.errors import UserError, suggestion
from pipeline.settings.config_file import project_file
from pipeline.settings.origin import named_places
from pipeline.settings.sections import SECTIONS, Settings, section_name
from pipeline.settings.together import check_together

#: Luigi's own sections; all others must be ours or a task's.
_LUIGI_SECTIONS = frozenset(
    (
        *("core", "retcode", "scheduler", "worker", "logging", "execution_summary", "batch_notifier", "resources"),
        *("email", "smtp", "sendgrid", "task_history", "task_status", "metrics", "prometheus", "cors"),
    )
)
#: Those of luigi's sections that are checked: their keys are parameters.
_CHECKED_LUIGI_SECTIONS = frozenset(("scheduler", "worker", "email", "smtp"))

#: Secret settings of this process as JSON: {section: {key: value}}.
SECRETS_VARIABLE = "SETTINGS_SECRETS"


@functools.cache
def load() -> Settings:
    """The settings of this process. Raises `UserError` for the first error."""
    path = os.environ.get("LUIGI_CONFIG_PATH")
    if path is not None and not Path(path).is_file():
        raise UserError(f"LUIGI_CONFIG_PATH = {path}: there is no such file; give a .cfg file, or unset it")
    for file in get_config()._config_paths:
        _require_readable(file)
    with named_places():
        _refuse_unknown()
        settings = Settings(**{section_name(section): _read(section) for section in SECTIONS})
        check_together(settings)
    return settings


def _require_readable(file: str) -> None:
    """Luigi passes over a settings file that it cannot read, and would use the defaults. Raises `UserError`."""
    if os.path.lexists(file):
        try:
            Path(file).open("rb").close()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}; check its permissions") from error


def overlaid(overlay: Mapping[str, Mapping[str, str]]) -> Settings:
    """The settings of this process with those of `overlay`: {section: {name: text}}. Raises `UserError`."""
    return _overlaid(recursively_freeze(overlay)) if overlay else load()


@functools.cache
def _overlaid(overlay: Mapping[str, Mapping[str, str]]) -> Settings:
    if errors := overlay_errors(overlay):
        raise UserError(errors[0])
    changed = {}
    for name, values in overlay.items():
        section = getattr(load(), name)
        parsed = {key: _parameter(section, key).parse(text) for key, text in values.items()}
        changed[name] = type(section)(**{**section.param_kwargs, **parsed})
    settings = dataclasses.replace(load(), **changed)
    check_together(settings)
    return settings


def overlay_errors(overlay: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What is wrong with individual names and values of an overlay."""
    sections, errors = {section_name(section): section for section in SECTIONS}, []
    for name, values in overlay.items():
        if name not in sections:
            errors.append(f"[{name}] is not a section of luigi.cfg; {suggestion(name, sections)}")
            continue
        known = [key for key, _ in sections[name].get_params()]
        for key, text in values.items():
            if key not in known:
                errors.append(f"[{name}] {key} is not a setting; {suggestion(key, known)}")
                continue
            try:
                _parameter(sections[name], key).parse(text)
            except UserError as error:
                errors.append(f"[{name}] {error}")
    return errors


def _parameter(section: Any, key: str) -> luigi.Parameter[Any]:
    parameter: luigi.Parameter[Any] = dict(section.get_params())[key]
    return parameter


def _read(section: type[luigi.Config]) -> Any:
    """Read one section. Raises `UserError`.

    Luigi reads [Phase1] for the class Phase1, so [phase1] is copied there for now. A class phase1 would make luigi's
    `--phase 2` ambiguous with `--phase1-lr`.
    """
    config, name = get_config(), section_name(section)
    for key, value in config.items(name, raw=True):
        try:
            config.set(section.__name__, key, value)
        except ValueError:  # invalid interpolation syntax
            raise _unescaped_percent(name, key) from None
    try:
        return section()
    except MissingParameterException as error:
        missing = re.findall(r"requires the '(\w+)' parameter", str(error))[0]
        defaults = project_file("luigi.cfg")
        raise UserError(
            f"[{name}] {missing} is not set, and {defaults}, with the defaults, lacks it; restore that file"
        ) from None
    except ValueError as error:  # luigi wraps what parameters and interpolation raise
        match error.__cause__:
            case UserError() as cause:
                raise UserError(f"[{name}] {cause}") from None
            case InterpolationMissingEnvvarError() as cause:
                found = re.search(r"variable (\S+)\. ", str(cause))  # the exception has no attribute for it
                raise UserError(
                    f"[{name}] {cause.option}: the environment variable {found and found[1]} is not set"
                ) from None
            case configparser.InterpolationError() as cause:
                raise _unescaped_percent(name, cause.option) from None
        raise
    finally:
        config.remove_section(section.__name__)


def _unescaped_percent(section: str, key: str) -> UserError:
    return UserError(f"[{section}] {key}: write %% for a % in a settings file (%%20 for a space in an address)")


def add_defaults() -> None:
    """Add the project's luigi.cfg below whatever luigi has read, whatever the current directory."""
    defaults = configparser.ConfigParser(interpolation=None)
    defaults.read_string(project_file("luigi.cfg").read_text(encoding="utf-8"))
    config = get_config()
    for section in defaults.sections():
        for key, value in defaults.items(section):
            if not config.has_option(section, key):
                config.set(section, key, value.replace("%", "%%"))
    _add_secrets()


def _add_secrets() -> None:
    """Add the secret settings that a night passes to its chain, which no file holds."""
    hidden = json.loads(os.environ.pop(SECRETS_VARIABLE, "{}"))
    for section, values in hidden.items():
        for key, value in values.items():
            get_config().set(section, key, value.replace("%", "%%"))


def _luigis_keys(section: str) -> set[str]:
    """The parameters of the class with the section's name, and others that are read from the section."""
    classes = [Register.get_task_cls(name) for name in ("core", *_CHECKED_LUIGI_SECTIONS, "sendgrid")]
    places = (one._config_path or {} for kind in classes for _, one in kind.get_params())
    known = {place["name"] for place in places if place.get("section") == section}
    return known | {name for name, _ in Register.get_task_cls(section).get_params()}


def _refuse_unknown() -> None:
    config = get_config()
    ours = {section_name(section): {name for name, _ in section.get_params()} for section in SECTIONS}
    tasks = set(Register.task_names()) - {section.__name__ for section in SECTIONS}
    for section in config.sections():
        if section in ours:
            known = ours[section]
        elif section in _CHECKED_LUIGI_SECTIONS:
            known = _luigis_keys(section)
        elif section in _LUIGI_SECTIONS | tasks:
            continue
        else:
            near = suggestion(section, [*ours, *sorted(_LUIGI_SECTIONS)])
            raise UserError(f"[{section}] is not a section of luigi.cfg; {near}")
        for key in config.options(section):
            spelt = key if section in ours else key.replace("-", "_")  # luigi reads either in its own
            if spelt not in known:
                raise UserError(f"[{section}] {key} is not a setting; {suggestion(key, sorted(known))}")
