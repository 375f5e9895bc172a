"""The sections on where training runs: [cluster], [slurm], [kubernetes]."""

from __future__ import annotations

import re
import shlex
from typing import Any

import luigi

from common.errors import UserError
from pipeline.settings.parameters import Choice, TextOrEmpty, number, setting, whole
from stages.precompile import PrecompileOptions
from trainer.config import TrainConfig

LAUNCHERS = ("local", "slurm", "kubernetes")
GANGS = ("none", "kueue", "jobset", "volcano")
#: The names that AWS's device plugins register. `neurondevice` is gone since Neuron 2.20.
CHIPS, CORES, EFA = "aws.amazon.com/neuron", "aws.amazon.com/neuroncore", "vpc.amazonaws.com/efa"
#: Physical NeuronCores per chip, by instance family: no more workers can share one.
_CORES_OF_CHIP = {"trn1": 2, "trn1n": 2, "trn2": 8, "trn2u": 8, "trn3": 8, "trn3u": 8}
INSTANCE_LABEL = "node.kubernetes.io/instance-type"
#: Options of sbatch that the job script sets and [slurm] sbatch_lines may not.
_OURS = (
    *("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--job-name", "-J", "--output", "-o", "--error", "-e"),
    *("--signal", "--requeue", "--no-requeue", "--open-mode", "--array", "-a", "--time", "-t", "--partition", "-p"),
    *("--account", "-A", "--chdir", "-D", "--wait", "-W", "--parsable", "--export"),
)
#: sbatch's time formats: minutes, minutes:seconds, hours:minutes:seconds, each also after days-.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


class Cluster(luigi.Config):
    device: str = setting(TrainConfig, "device")
    launcher = Choice(LAUNCHERS)
    nnodes: int = whole(1, 4096)
    build_nodes: int = whole(1, 4096)
    node_rank: int = whole(0, 4095)
    master_addr = luigi.StrParameter()
    master_port: int = whole(1024, 65_000)
    join_timeout_s: float = number(1)
    nproc_per_node: int = whole(1, 1024)
    tensor_parallel_size: int = setting(TrainConfig, "tensor_parallel_size", most=1024)
    data_parallel: str = setting(TrainConfig, "data_parallel")
    shard_optimizer: bool = setting(TrainConfig, "shard_optimizer")
    batches_per_execution: int = setting(TrainConfig, "batches_per_execution")
    compile: bool = setting(TrainConfig, "compile")
    self_test: bool = setting(PrecompileOptions, "self_test")
    allow_fallbacks = TextOrEmpty()
    collective_timeout_s: float = setting(TrainConfig, "collective_timeout_s")
    hang_timeout_s: float = number(1)
    spot_watch: bool = setting(TrainConfig, "spot_watch")

    @property
    def workers(self) -> int:
        """Workers on all machines."""
        return self.nnodes * self.nproc_per_node

    @property
    def layout(self) -> dict[str, Any]:
        """The parallel layout, on which compiled graphs depend."""
        names = ("nnodes", "nproc_per_node", "tensor_parallel_size", "data_parallel")
        return {name: getattr(self, name) for name in names}

    @property
    def data_parallel_size(self) -> int:
        return self.workers // self.tensor_parallel_size

    @property
    def follows(self) -> bool:
        """Whether this machine is one of several started by hand, but not the first: it trains with the others and
        waits for the stages that the first runs alone."""
        return self.launcher == "local" and self.node_rank > 0

    def check(self) -> None:
        """Check settings against each other. Raises `UserError`."""
        if self.nproc_per_node % self.tensor_parallel_size:
            raise UserError(
                f"[cluster] tensor_parallel_size = {self.tensor_parallel_size} does not divide nproc_per_node: "
                f"data-parallel size = {self.nnodes} × {self.nproc_per_node} / {self.tensor_parallel_size} = "
                f"{self.workers / self.tensor_parallel_size:g}, but each node needs whole copies of the model; change "
                f"one of them"
            )
        if self.node_rank >= self.nnodes:
            raise UserError(
                f"[cluster] node_rank = {self.node_rank} is not one of nnodes = {self.nnodes}; allowed: 0 to "
                f"{self.nnodes - 1}"
            )
        if self.launcher == "local":
            if self.nnodes > 1 and not self.master_addr:
                raise UserError(
                    f"[cluster] nnodes = {self.nnodes} with launcher = local needs master_addr, the address of the "
                    f"machine with node_rank = 0"
                )
            if self.build_nodes not in (1, self.nnodes):
                raise UserError(
                    f"[cluster] build_nodes = {self.build_nodes} with launcher = local; allowed: 1, or nnodes = "
                    f"{self.nnodes}, the machines on which luigi is started"
                )
        elif self.node_rank or self.master_addr:
            raise UserError(
                f"[cluster] node_rank and master_addr are for machines started by hand; launcher = {self.launcher} "
                f"finds them itself: leave them at 0 and empty"
            )


class Slurm(luigi.Config):
    partition = luigi.StrParameter()
    account = luigi.StrParameter()
    time_limit = luigi.StrParameter()
    signal_s: int = whole(1, 65_535)
    sbatch_lines = luigi.StrParameter()

    @property
    def extra_lines(self) -> list[str]:
        """The lines of `sbatch_lines`."""
        return [line for line in map(str.strip, self.sbatch_lines.splitlines()) if line]

    def check(self) -> None:
        """Raises `UserError`."""
        seconds = limit_s(self.time_limit) if self.time_limit else None
        # Slurm may send the signal up to 60 s early.
        if seconds is not None and seconds <= self.signal_s + 60:
            raise UserError(
                f"[slurm] time_limit = {self.time_limit} ({seconds} s) leaves no time before the signal, which comes "
                f"signal_s = {self.signal_s} s and up to 60 s more ahead of it; raise the one or lower the other"
            )
        for line in self.extra_lines:
            try:
                words = shlex.split(line)
            except ValueError as error:  # a quotation mark or an escape without its end
                raise UserError(
                    f"[slurm] sbatch_lines: {line} is not allowed: {str(error).lower()}; write it as in a shell"
                ) from None
            for word in words:
                name = word.partition("=")[0] if word.startswith("--") else word[:2]  # -pother is -p other
                if name in _OURS or not line.startswith("-"):
                    raise UserError(
                        f"[slurm] sbatch_lines: {line} is not allowed; give options of sbatch without #SBATCH, a line "
                        f"or more, but none of {', '.join(option for option in _OURS if option.startswith('--'))}"
                    )


def limit_s(text: str) -> int:
    """Seconds of a time in sbatch's formats. Raises `UserError`."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(
            f"[slurm] time_limit = {text} is not a time; write minutes, hours:minutes:seconds or "
            f"days-hours:minutes:seconds"
        )
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # M, M:S
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class Kubernetes(luigi.Config):
    gang = Choice(GANGS)
    queue = luigi.StrParameter()
    image = luigi.StrParameter()
    namespace = luigi.StrParameter()
    volume_claim = luigi.StrParameter()
    mount_path = luigi.StrParameter()
    pod_resources = luigi.StrParameter()
    node_selector = luigi.StrParameter()
    service_account = luigi.StrParameter()
    start_timeout_s: float = number(0)

    @property
    def quantities(self) -> dict[str, str]:
        """`pod_resources` by name. Raises `UserError`."""
        return self._pairs("pod_resources")

    @property
    def labels(self) -> dict[str, str]:
        """`node_selector` by name. Raises `UserError`."""
        return self._pairs("node_selector")

    def _pairs(self, name: str) -> dict[str, str]:
        found = {}
        for word in getattr(self, name).split():
            key, equals, value = word.partition("=")
            if not (key and equals and value):
                raise UserError(f"[kubernetes] {name}: {word} is not allowed; write name=value, separated by spaces")
            found[key] = value
        return found

    @property
    def is_kueues(self) -> bool:
        """Whether Kueue decides when it starts."""
        return self.gang == "kueue" or (self.gang == "jobset" and self.queue != "")

    def check(self, cluster: Cluster) -> None:
        """Check that a manifest can be made. Raises `UserError`."""
        for name in ("image", "volume_claim", "mount_path"):
            if not getattr(self, name):
                raise UserError(f"[kubernetes] {name} is empty; launcher = kubernetes needs it (docs/cluster.md)")
        if not self.mount_path.startswith("/"):
            raise UserError(f"[kubernetes] mount_path = {self.mount_path} is not allowed; allowed: an absolute path")
        if self.gang == "none" and self.queue:
            raise UserError(
                f"[kubernetes] queue = {self.queue} goes with gang = kueue, jobset or volcano; empty it, or choose one"
            )
        if self.gang == "kueue" and not self.queue:
            raise UserError("[kubernetes] gang = kueue needs queue, the name of one of Kueue's LocalQueues")
        _ = self.labels  # raises
        self._check_neuron(cluster)

    def _check_neuron(self, cluster: Cluster) -> None:
        """Check that pods request what Trainium's workers need, under today's names. Raises `UserError`."""
        quantities, of = self.quantities, "[kubernetes] pod_resources"
        for name in quantities:
            if name.startswith(("aws.amazon.com/neuron", "vpc.amazonaws.com/")) and name not in (CHIPS, CORES, EFA):
                raise UserError(f"{of}: {name} is not what AWS's plugins register; allowed: {CHIPS}, {CORES}, {EFA}")
            if name in (CHIPS, CORES, EFA) and not quantities[name].isdecimal():
                raise UserError(f"{of}: {name}={quantities[name]} is not allowed; allowed: a whole number")
        if CHIPS in quantities and CORES in quantities:
            raise UserError(f"{of}: {CHIPS} (whole chips) and {CORES} exclude each other; keep one")
        if not cluster.device.startswith("neuron"):
            return
        family = self.labels.get(INSTANCE_LABEL, "").partition(".")[0]
        cores_of_chip = _CORES_OF_CHIP.get(family, max(_CORES_OF_CHIP.values()))
        cores = int(quantities.get(CORES, 0)) or int(quantities.get(CHIPS, 0)) * cores_of_chip
        if cores < cluster.nproc_per_node:
            raise UserError(
                f"{of} = {self.pod_resources or '(empty)'} has at most {cores} NeuronCores for [cluster] "
                f"nproc_per_node = {cluster.nproc_per_node} on device {cluster.device}; request more of {CHIPS}, or "
                f"lower nproc_per_node"
            )
        if cluster.nnodes > 1 and EFA not in quantities:
            raise UserError(
                f"{of} has no {EFA}, over which [cluster] nnodes = {cluster.nnodes} machines with Trainium "
                f"communicate; add {EFA}=8 (trn1.32xlarge) or what your instances have"
            )
