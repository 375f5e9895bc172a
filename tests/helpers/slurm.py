"""Our own Slurm on loopback: slurmctld, munged and four slurmd, each a node with one core. It leaves nothing behind."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from tests.helpers.chain import wait_until
from tests.helpers.support import free_port

NODES = ("n1", "n2", "n3", "n4")
#: Debian's packages slurmctld, slurmd and munge (and slurm-client, which comes with them).
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# cred_expire: how long after its start a job that is put back into the queue waits; 120 s unless set.
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdTimeout=60
KillWait=2
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


class Slurm:
    """Running from `start` to `stop`; `environment` is what its commands need."""

    def __init__(self) -> None:
        # Not below pytest's directory: the path of a socket must be short.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.config = self.root / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.config)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1" for name in NODES
        )
        values = {"host": host, "port": free_port(), "user": getpass.getuser(), "root": self.root, "nodes": nodes}
        self.config.write_text(CONFIG.format(**values))
        (self.root / "state").mkdir()
        munge = self.root / "munge"
        munge.mkdir(mode=0o700)
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = (f"--{name}={munge / name}" for name in ("socket", "key-file", "pid-file", "log-file", "seed-file"))
        key.rename(munge / "key-file")
        self._run("munged", "--foreground", "--force", "--num-threads=2", *files)
        wait_until((munge / "socket").exists, timeout_s=20, every_s=0.05)
        self._run("slurmctld", "-D", "-c")
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T %D").split() == ["idle", "4"], timeout_s=30, every_s=0.1)

    def start_node(self, name: str) -> None:
        """Start a node on one core of this machine, so that it has as many threads as cores."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[NODES.index(name) % len(cores)]})
        try:
            self._run("slurmd", "-D", "-N", name)
        finally:
            os.sched_setaffinity(0, cores)

    def _run(self, *words: str) -> None:
        with (self.root / "daemons.log").open("ab") as log:
            program = shutil.which(words[0], path=_PATH)
            assert program is not None
            self._daemons[" ".join(words[-2:]) if words[0] == "slurmd" else words[0]] = subprocess.Popen(
                [program, *words[1:]], env={**os.environ, **self.environment}, stdout=log, stderr=log, cwd=self.root
            )

    def kill_node(self, name: str) -> None:
        """As in a power failure: kill its daemon and everything it runs, at once; and let Slurm find out."""
        daemon = self._daemons.pop(f"-N {name}")
        for process in self.processes():
            if process.pid == daemon.pid or self._node_of(process) == name:
                process.kill()
        daemon.wait()
        # Slurm does this itself after SlurmdTimeout, which is set long enough for a busy machine.
        self.ask("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")

    @staticmethod
    def _node_of(process: psutil.Process) -> str | None:
        try:
            if "slurmstepd" in process.name():
                children = process.children(recursive=True)
                return next((name for child in children if (name := child.environ().get("SLURMD_NODENAME"))), None)
            return process.environ().get("SLURMD_NODENAME")
        except psutil.Error:
            return None

    def ask(self, *words: str) -> str:
        """Run one of Slurm's commands; returns its output."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All living processes that it has started."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("SLURM_CONF") == str(self.config)
                if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def stop(self) -> None:
        """End all jobs and daemons, and remove everything."""
        try:
            if "slurmctld" in self._daemons:
                self.ask("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
            for daemon in reversed(self._daemons.values()):
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(timeout=30)
        finally:
            for process in self.processes():
                process.kill()
            for daemon in self._daemons.values():
                daemon.wait(timeout=10)
            wait_until(lambda: not self.processes(), timeout_s=10)
            shutil.rmtree(self.root)
