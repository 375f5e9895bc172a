"""Slurm: a batch job; the supervisor on its first node starts one task on each node with `srun -K1`."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.process import MASTER_ADDR_VARIABLE, NODE_RANK_VARIABLE
from pipeline.launchers.base import StageCommand
from pipeline.launchers.jobs import SCRIPT, Job, State, Unreachable
from pipeline.launchers.process import LaunchSpec
from pipeline.launchers.tools import TIMEOUT_S, last_line, run_tool
from pipeline.settings import cluster

#: States from which a job does not come back (squeue(1), "JOB STATE CODES").
_OVER = frozenset(
    (
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
        *("PREEMPTED", "REVOKED", "SPECIAL_EXIT", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    )
)
#: Reasons for which a job stays pending forever (squeue(1), "JOB REASON CODES").
_STUCK = frozenset(
    (
        *("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "InvalidAccount"),
        *("InvalidQOS", "AccountNotAllowed", "QOSNotAllowed", "PartitionInactive"),
    )
)
#: Sets each task's node rank in torchrun's variable.
_ON_EACH_NODE = f'export {NODE_RANK_VARIABLE}=$SLURM_NODEID; exec "$@"'
#: Seconds within which the other tasks must end after the first one has. Without a limit srun waits forever for a
#: task whose slurmstepd was killed.
_WAIT_S = 60


class SlurmScheduler:
    name = "slurm"

    def __init__(self, settings: cluster.Slurm | None = None) -> None:
        """`settings` are needed only for `submit`."""
        self._settings = settings
        self.place: dict[str, str] = {}

    def submit(self, work: StageCommand, job: Job) -> str:
        assert self._settings is not None
        script = work.directory / SCRIPT
        script.write_text(batch_script(work, job, self._settings), encoding="utf-8")
        done = _slurm("sbatch", "--parsable", str(script))
        if done.returncode:
            raise UserError(f"sbatch refused {script}: {last_line(done)}; see [slurm] in luigi.cfg")
        return done.stdout.strip().partition(";")[0]  # id;cluster in a federation

    def find(self, record: dict[str, Any]) -> str | None:
        done = _slurm("squeue", "--noheader", "--states=all", f"--name={record['name']}", "--format=%i")
        if done.returncode:
            raise Unreachable(last_line(done))
        return next(iter(done.stdout.split()), None)

    def ask(self, job_id: str) -> State | None:
        done = _slurm("scontrol", "show", "job", "--oneliner", job_id)
        if done.returncode:
            if "Invalid job id" in done.stderr:
                return None
            raise Unreachable(last_line(done))
        fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", done.stdout))
        name, detail = fields["JobState"], fields.get("Reason", "None")
        if detail == "None":
            detail = "" if fields.get("NodeList") in (None, "", "(null)") else f"on {fields['NodeList']}"
        stuck = name == "PENDING" and detail in _STUCK
        return State(name, detail, name not in _OVER, name == "CANCELLED", stuck)

    def tidy(self, job_id: str) -> None:
        """Nothing: Slurm removes old jobs itself."""

    def cancel(self, job_id: str) -> None:
        done = _slurm("scancel", job_id)
        if done.returncode:
            raise Unreachable(last_line(done))


def batch_script(work: StageCommand, job: Job, settings: cluster.Slurm) -> str:
    """The script for sbatch. Raises `UserError`."""
    directory = str(work.directory.absolute())
    if "\\" in directory:
        raise UserError(
            f"{directory} has a backslash, after which Slurm does not expand %j in a log's name; rename [run] work_dir"
        )
    options = {
        "job-name": job.record["name"],
        "nodes": work.nodes,
        "ntasks-per-node": 1,
        "output": f"{directory.replace('%', '%%')}/job-%j.log",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time_limit,
        "signal": f"B:USR1@{settings.signal_s}",
    }
    # sbatch parses quotes in these lines as a shell does; a # outside quotes starts a comment.
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value != ""]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {line}" for line in settings.extra_lines)]
    words = [sys.executable, "-m", "pipeline.launchers.supervisor", work.directory.absolute(), job.record["token"]]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(map(str, words))}", ""])


class InJob:
    """The supervisor's surroundings in a Slurm job."""

    #: Slurm sends SIGUSR1 before the time limit, SIGTERM when the job is cancelled or requeued.
    limit_signal: signal.Signals | None = signal.SIGUSR1

    def __init__(self) -> None:
        self.rank = 0
        self.is_restarted = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0

    def start(self, nodes: int, *, end_together: bool) -> LaunchSpec:
        """One task on each node; if one fails, `-K1` ends all. srun passes SIGUSR1 on, and kills on SIGTERM."""
        srun = ["srun", "-K1", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        if end_together:
            srun.append(f"--wait={_WAIT_S}")
        return LaunchSpec(
            prefix=(*srun, "bash", "-c", _ON_EACH_NODE, "task"),
            # The workers divide the cores of a node themselves.
            environment={MASTER_ADDR_VARIABLE: _address_of_first_node(), "SLURM_CPU_BIND": "none"},
            is_shown=False,
            signals=(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
            stop_signal=signal.SIGUSR1,
        )

    def keeps_nodes(self) -> bool:
        """False if a node does not answer ("allocated*"), is down, or is to be taken out of service ("draining")."""
        found = _slurm("sinfo", "--noheader", "--Node", f"--nodes={os.environ['SLURM_JOB_NODELIST']}", "--format=%T")
        return found.returncode == 0 and set(found.stdout.split()) <= {"allocated", "mixed"}

    def requeue(self) -> str | None:
        """Requeue this job, which ends this process; returns Slurm's message if it refuses."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        done = _slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
        if done.returncode:
            return last_line(done)
        time.sleep(TIMEOUT_S)  # until that ends this process
        return "it had no effect"


def _address_of_first_node() -> str:
    """The first node's address in Slurm's configuration, by default its name."""
    names = _slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).stdout.split()
    if not names:
        raise UserError(f"scontrol show hostnames returned nothing for {os.environ['SLURM_JOB_NODELIST']}")
    found = re.search(r"\bNodeAddr=(\S+)", _slurm("scontrol", "show", "node", "--oneliner", names[0]).stdout)
    return found[1] if found else names[0]


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    return run_tool(*words, absent="[cluster] launcher = slurm is for a machine that submits jobs")
