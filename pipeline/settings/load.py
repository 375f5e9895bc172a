"""The only reader of luigi.cfg: every setting typed, in range, and known.

The defaults are the file luigi.cfg that comes with the project; what the user's own luigi.cfg, LUIGI_CONFIG_PATH or
the command line (`--Phase1-lr 1e-3`) says is laid over it. Each section is a luigi Config.
"""

from __future__ import annotations

import configparser
import difflib
import functools
import json
import os
from pathlib import Path
from typing import Any

from luigi.configuration import get_config
from luigi.task_register import Register

from common.errors import UserError
from pipeline.settings.sections import SECTIONS, Settings, section_name
from trainer.config import require_agreement
from trainer.parallel.plan import require_divisible

#: Sections that belong to luigi itself; everything else must be ours or a task's.
_LUIGI_SECTIONS = frozenset(
    (
        *("core", "retcode", "scheduler", "worker", "logging", "execution_summary", "batch_notifier", "resources"),
        *("email", "smtp", "sendgrid", "task_history", "task_status", "metrics", "prometheus", "cors"),
    )
)


#: Secret settings of this process: a JSON object of sections, as objects of keys.
SECRETS_VARIABLE = "SETTINGS_SECRETS"


@functools.cache
def load() -> Settings:
    """The settings of this process. Raises `UserError`: one line for the first thing that is wrong."""
    path = os.environ.get("LUIGI_CONFIG_PATH")
    if path is not None and not Path(path).is_file():
        raise UserError(f"LUIGI_CONFIG_PATH = {path}: there is no such file; give a .cfg file, or unset it")
    _refuse_unknown()
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        try:
            sections[section_name(section)] = section()
        except ValueError as error:  # luigi's wrapping of what a parameter raises
            if not isinstance(error.__cause__, UserError):
                raise
            raise UserError(f"[{section_name(section)}] {error.__cause__}") from None
    settings = Settings(**sections)
    _check_together(settings)
    return settings


def add_defaults() -> None:
    """Lay the project's luigi.cfg under whatever luigi has read, so that it holds in any directory."""
    here = Path(__file__).parents[1]
    defaults = configparser.ConfigParser(interpolation=None)
    # An installed package carries the file; a checkout has it one level up.
    defaults.read_string(
        next(p for p in (here / "luigi.cfg", here.parent / "luigi.cfg") if p.exists()).read_text(encoding="utf-8")
    )
    config = get_config()
    for section in defaults.sections():
        for key, value in defaults.items(section):
            if not config.has_option(section, key):
                config.set(section, key, value.replace("%", "%%"))
    _add_secrets()


def _add_secrets() -> None:
    """Lay over it the settings that a file does not hold as they are secret: those that a night gives its chain."""
    hidden = json.loads(os.environ.pop(SECRETS_VARIABLE, "{}"))
    for section, values in hidden.items():
        for key, value in values.items():
            get_config().set(section, key, value.replace("%", "%%"))


def _refuse_unknown() -> None:
    config = get_config()
    ours = {section_name(section): {name for name, _ in section.get_params()} for section in SECTIONS}
    tasks = set(Register.task_names())
    for section in config.sections():
        if section not in ours:
            if section not in _LUIGI_SECTIONS | tasks:
                raise UserError(f"[{section}] is not a section of luigi.cfg; {_nearest(section, ours)}")
            continue
        for key in config.options(section):
            if key not in ours[section]:
                raise UserError(f"[{section}] {key} is not a setting; {_nearest(key, ours[section])}")


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"


def _check_together(settings: Settings) -> None:
    """What no single setting can know. Raises `UserError`."""
    cluster = settings.cluster
    cluster.check()
    if cluster.launcher == "slurm":
        settings.slurm.check()
    if cluster.launcher == "kubernetes":
        settings.kubernetes.check()
    for phase in (1, 2):
        at = settings.phase(phase)
        require_agreement(at.optimizer, settings.precision.mode)
        usteps, per_execution = settings.grad_accum_usteps(phase), cluster.batches_per_execution
        if usteps % per_execution:
            raise UserError(
                f"[phase{phase}] has {usteps} micro-steps in a step, which [cluster] batches_per_execution = "
                f"{per_execution} does not divide; change one of them"
            )
        if at.seq_len > settings.model.max_position_embeddings:
            raise UserError(
                f"[phase{phase}] seq_len = {at.seq_len} is longer than [model] max_position_embeddings = "
                f"{settings.model.max_position_embeddings}; shorten the one or raise the other"
            )
        if at.warmup_steps > at.max_steps:
            raise UserError(
                f"[phase{phase}] warmup_steps = {at.warmup_steps} is more than max_steps = {at.max_steps}; lower it"
            )
        if at.max_pred_len > at.seq_len:
            raise UserError(
                f"[phase{phase}] max_pred_len = {at.max_pred_len} is more than seq_len = {at.seq_len}; lower it"
            )
    require_divisible(settings.model.config(settings.model.downloaded_vocab_size), cluster.tensor_parallel_size)
