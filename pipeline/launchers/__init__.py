"""Where a stage's command runs: on this machine, on several machines started by hand, on Slurm, on Kubernetes.

local.py, slurm.py and kubernetes.py: one launcher each; kubernetes_manifest.py makes the last's manifest. jobs.py
submits, watches and finds the jobs of the last two; supervisor.py runs inside the job. restarts.py decides on restarts.
"""

from __future__ import annotations

from pathlib import Path

from common.files import read_json
from pipeline.launchers.base import Launcher
from pipeline.launchers.jobs import Job, JobLauncher
from pipeline.launchers.local import Local
from pipeline.settings.sections import Settings
from stages.directory.lock import JOB


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
    """The job submitted for a stage directory whose end has not been handled yet, or None."""
    record = read_json(directory / JOB)
    if record is None:
        return None
    from pipeline.launchers.kubernetes import KubernetesScheduler
    from pipeline.launchers.slurm import SlurmScheduler

    if record["launcher"] == "slurm":
        return Job(directory, record, SlurmScheduler())
    return Job(directory, record, KubernetesScheduler(gang=record.get("gang", "none")))
