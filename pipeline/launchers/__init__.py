"""Where a stage's command runs: on this machine, on several machines started by hand, on Slurm, on Kubernetes.

local.py, slurm.py and kubernetes.py: one launcher each; kubernetes_manifest.py makes the last's manifest. jobs.py
submits, watches and finds the jobs of the last two; supervisor.py runs inside the job. restarts.py decides on restarts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import parse_utc
from pipeline.launchers.base import Launcher
from pipeline.launchers.jobs import Job, JobLauncher
from pipeline.launchers.local import Local
from pipeline.settings.sections import Settings
from stages.directory.lock import JOB, read_job


def launcher(settings: Settings, *, on_cluster: bool) -> Launcher:
    """The launcher of a stage's command. Raises `UserError`."""
    if settings.cluster.launcher == "slurm" and on_cluster:
        from pipeline.launchers.slurm import SlurmScheduler

        return JobLauncher(SlurmScheduler(settings.slurm))
    if settings.cluster.launcher == "kubernetes" and on_cluster:
        from pipeline.launchers.kubernetes import KubernetesScheduler

        return JobLauncher(KubernetesScheduler(settings.kubernetes, settings.cluster.master_port))
    return Local(settings.cluster)


def find_job(directory: Path) -> Job | None:
    """The job submitted for a stage directory whose end has not been handled yet, or None.

    Raises `UserError` if its record is damaged: the job may be running, and without it the stage would be made twice.
    """
    record = read_job(directory)
    if record is None:
        return None
    from pipeline.launchers.kubernetes import START_TIMEOUT_S, KubernetesScheduler
    from pipeline.launchers.slurm import SlurmScheduler

    if not _is_job(record):
        raise UserError(
            f"{directory / JOB} is damaged: it does not say which job makes the stage; look for one in its scheduler, "
            f"and remove the file once it is over"
        )
    if record["launcher"] == "slurm":
        return Job(directory, record, SlurmScheduler())
    timeout_s = record.get("start_timeout_s", START_TIMEOUT_S)
    return Job(directory, record, KubernetesScheduler(gang=record.get("gang", "none"), start_timeout_s=timeout_s))


def _is_job(record: dict[str, Any]) -> bool:
    """Whether everything that is read of it has its type, and what is passed to a scheduler's command is a name."""
    from pipeline.launchers.kubernetes_manifest import GANGS

    gang = record.get("gang", "none")
    names = [record.get("token"), record.get("name"), record.get("id", "none"), gang]
    names += [record.get("namespace")] if record.get("launcher") == "kubernetes" else []
    try:
        parse_utc(record["submitted"])
    except (KeyError, TypeError, ValueError):
        return False
    log_began, timeout_s = record.get("log_began"), record.get("start_timeout_s", 0)
    return (
        record.get("launcher") in ("slurm", "kubernetes")
        and all(isinstance(name, str) and re.fullmatch(r"[\w./-]+", name) for name in names)
        and gang in GANGS
        and isinstance(log_began, int)
        and 0 <= log_began < 1 << 63
        and isinstance(timeout_s, (int, float))
    )
