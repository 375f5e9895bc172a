"""What starts training, and where they meet: Slurm, Kubernetes, ports, luigid."""

from __future__ import annotations

import errno
import os
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from luigi.interface import core

from pipeline.commands.doctor.finding import Finding, Plan
from pipeline.launchers.tools import last_line, run_tool
from pipeline.settings.sections import Settings

#: Seconds for luigid, or the first machine's name, to answer.
_PATIENCE_S = 5.0


def scheduler(plan: Plan) -> Iterator[Finding]:
    """Whether the scheduler answers, and would take the training's job."""
    settings = plan.settings
    look = {"slurm": _slurm, "kubernetes": _kubernetes}.get(settings.cluster.launcher)
    if look is not None:
        yield from look(settings)


def _slurm(settings: Settings) -> Iterator[Finding]:
    absent = "[cluster] launcher = slurm needs Slurm's commands on the machine that submits jobs"
    seen = run_tool("sinfo", "--noheader", "--format=%P %D %T", absent=absent)
    if seen.returncode:
        yield Finding("scheduler", "problem", f"sinfo: {last_line(seen)}; is slurmctld running, and this machine in "
                      f"its configuration?")  # fmt: skip
        return
    slurm = settings.slurm
    options = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time_limit}
    words = [f"--{name}={value}" for name, value in options.items() if value]
    words += [word for line in slurm.extra_lines for word in shlex.split(line, comments=True)]
    asked = run_tool(
        "sbatch", "--test-only", f"--nodes={settings.cluster.nnodes}", "--ntasks-per-node=1", *words, "--wrap=true",
        absent=absent,
    )  # fmt: skip
    if asked.returncode:
        yield Finding("scheduler", "problem", f"sbatch would refuse the job: {last_line(asked)}; see [slurm] and "
                      f"[cluster] nnodes, and sinfo")  # fmt: skip
    else:
        said = re.sub(r"^sbatch: (Job \d+)?", "", last_line(asked)).strip()
        yield Finding("scheduler", "ok", f"Slurm would take a job of {settings.cluster.nnodes} nodes: {said}")


def _kubernetes(settings: Settings) -> Iterator[Finding]:
    kubernetes, absent = settings.kubernetes, "[cluster] launcher = kubernetes needs it on this machine"
    where = f"--namespace={kubernetes.namespace}"
    kind = "jobsets.jobset.x-k8s.io" if kubernetes.gang == "jobset" else "jobs.batch"
    may = run_tool("kubectl", "auth", "can-i", "create", kind, where, absent=absent)
    if may.returncode:
        yield Finding("scheduler", "problem", f"kubectl auth can-i create {kind}: {last_line(may)}; check kubectl's "
                      f"context, and your rights in namespace {kubernetes.namespace}")  # fmt: skip
        return
    yield Finding("scheduler", "ok", f"Kubernetes lets you create {kind} in namespace {kubernetes.namespace}")
    claim = run_tool("kubectl", "get", "persistentvolumeclaim", kubernetes.volume_claim, where, absent=absent)
    mounted, work = Path(kubernetes.mount_path), settings.work_dir.absolute()
    if claim.returncode:
        yield Finding("volume", "problem", f"[kubernetes] volume_claim: {last_line(claim)}; see kubectl get pvc")
    elif not mounted.is_dir() or not work.is_relative_to(mounted):
        yield Finding("volume", "problem", f"[run] work_dir = {work} is not below [kubernetes] mount_path = {mounted}, "
                      f"or that is not mounted here; pods share nothing else with this machine")  # fmt: skip
    else:
        yield Finding("volume", "ok", f"{kubernetes.volume_claim}, mounted on {mounted}")


def ports(plan: Plan) -> Iterator[Finding]:
    """The ports at which machines started by hand meet, and luigid."""
    cluster = plan.settings.cluster
    if cluster.launcher == "local" and cluster.nnodes > 1:
        yield _way_to_first(cluster.master_addr) if cluster.follows else _free(_meeting_ports(plan))
    settings = core()
    if not settings.local_scheduler:
        url = settings.scheduler_url or f"http://{settings.scheduler_host}:{settings.scheduler_port}"
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if not port or not parts.hostname or parts.scheme not in ("http", "https"):
            yield Finding("luigid", "problem", f"[core] scheduler_url = {url}; allowed: http://HOST:PORT, or https")
            return
        try:
            socket.create_connection((parts.hostname, port), timeout=_PATIENCE_S).close()
        except OSError as error:
            yield Finding("luigid", "problem", f"{parts.hostname}:{port} does not answer: {_reason(error)}; start it "
                          f"with python -m pipeline luigid, or set [core] local_scheduler = true")  # fmt: skip
        else:
            yield Finding("luigid", "ok", f"{parts.hostname}:{port} answers")


def _meeting_ports(plan: Plan) -> list[int]:
    """Training's own ports: one for each phase, and the MLP's."""
    first = plan.settings.cluster.master_port
    offsets = {stage.port_offset for stage in plan.stages() if stage.on_all_nodes}
    return sorted(first + offset for offset in offsets)


def _free(wanted: list[int]) -> Finding:
    for port in wanted:
        try:
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("0.0.0.0", port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {_reason(error)}"
            return Finding("ports", "problem", f"port {port} {why}, but the machines are to meet there; stop what "
                           f"holds it (ss -ltnp), or choose another [cluster] master_port on all of them")  # fmt: skip
    return Finding("ports", "ok", f"{', '.join(map(str, wanted))} are free for the machines to meet")


def _way_to_first(address: str) -> Finding:
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return Finding("ports", "problem", f"[cluster] master_addr = {address}: {_reason(error)}; give the address of "
                       f"the machine with node_rank = 0")  # fmt: skip
    return Finding("ports", "ok", f"[cluster] master_addr = {address} resolves here")


def _reason(error: OSError) -> str:
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))
