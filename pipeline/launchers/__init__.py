"""Where a stage's command runs: here, here and on other machines started by hand, as a Slurm job, on Kubernetes.

local.py, slurm.py, kubernetes.py: one file each. jobs.py is what the last two share on this side, a job that is
submitted, watched and found again; supervisor.py is what runs in the job. restarts.py: how often it is tried again.
"""

from __future__ import annotations

from pathlib import Path

from common.files import read_json
from pipeline.launchers.base import Launcher
from pipeline.launchers.jobs import Job, JobLauncher, Scheduler
from pipeline.launchers.kubernetes import KubernetesScheduler
from pipeline.launchers.local import Local
from pipeline.launchers.slurm import SlurmScheduler
from pipeline.settings.sections import Settings
from stages.directory.lock import JOB


def launcher(settings: Settings, *, on_cluster: bool) -> Launcher:
    """What starts a stage's command, with these settings. Raises `UserError`."""
    if settings.cluster.launcher == "slurm" and on_cluster:
        return JobLauncher(SlurmScheduler(settings.slurm))
    if settings.cluster.launcher == "kubernetes" and on_cluster:
        return JobLauncher(KubernetesScheduler(settings.kubernetes, settings.cluster.master_port))
    return Local(settings.cluster)


def find_job(directory: Path) -> Job | None:
    """The job that was submitted for a stage directory and whose end nobody has seen, or None."""
    record = read_json(directory / JOB)
    if record is None:
        return None
    schedulers: dict[str, type[Scheduler]] = {
        "slurm": SlurmScheduler,
        "kubernetes": KubernetesScheduler,
    }
    return Job(directory, record, schedulers[record["launcher"]]())
