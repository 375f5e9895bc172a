"""The first line of a run: what is made, where, on which device, and how long it takes."""

from __future__ import annotations

import luigi

from common.errors import EXIT_INTERRUPTED
from common.process import available_cores
from pipeline.console.select import console
from pipeline.luigi_adapters import exits
from pipeline.settings.cluster import Cluster
from pipeline.status.chain import chain, is_complete
from pipeline.status.stage_dirs import StageDirs
from pipeline.tasks.goal import Goal
from pipeline.tasks.stage import Stage
from stages.view.text import duration

#: On a machine where nothing like it was made before.
_UNKNOWN = ", time not known yet"
_is_printed = False


@luigi.Task.event_handler(luigi.Event.START)  # type: ignore[untyped-decorator]
@luigi.Task.event_handler(luigi.Event.DEPENDENCY_DISCOVERED)  # type: ignore[untyped-decorator]
def _print_header(task: luigi.Task, dependency: luigi.Task | None = None) -> None:
    """Print it before the first stage runs. The first task is the requested one, which may depend on nothing."""
    global _is_printed
    if _is_printed or not isinstance(task, (Goal, Stage)):
        return
    _is_printed = True
    try:
        _print(task)
    except KeyboardInterrupt as stop:  # which luigi drops here
        exits.exit_now(getattr(stop, "code", EXIT_INTERRUPTED))


def _print(task: Goal | Stage) -> None:
    stages = chain(task)
    left = sum(not is_complete(stage) for stage in stages)
    if left:
        settings = task.settings
        console().header(
            f"{type(task).__name__}: {left} of {len(stages)} stages to make in {settings.work_dir}, "
            f"{_device(settings.cluster)}, "
            f"{_workers(settings.cluster)}{_how_long(task)}"
        )


def _device(cluster: Cluster) -> str:
    """The device, without importing torch, which decides what `auto` is."""
    if cluster.device != "auto":
        return f"device {cluster.device}"
    if cluster.launcher != "local":
        return "device auto: an accelerator of the nodes, else their CPUs"
    from pipeline.commands.init.surroundings import gpus, neuron_cores

    if (seen := gpus()) is not None:
        return f"device auto: {seen.count} × {seen.name}"
    cores = neuron_cores()
    return f"device auto: {cores} NeuronCores" if cores else "device auto: the CPU"


def _workers(cluster: Cluster) -> str:
    """What trains: the cores here, or on other machines the workers."""
    if cluster.launcher == "local":
        return f"{available_cores()} cores"
    nodes, workers = cluster.nnodes, cluster.nproc_per_node
    return f"{nodes} node{'s' if nodes > 1 else ''} × {workers} worker{'s' if workers > 1 else ''}"


def _how_long(task: Goal | Stage) -> str:
    """The sum over the stages to make, as far as stages made here before show it."""
    from pipeline.commands.doctor.estimates import Estimates
    from pipeline.commands.doctor.finding import Plan

    work_dir = task.settings.work_dir
    if not work_dir.is_dir():
        return _UNKNOWN
    known = [found.seconds for found in Estimates(Plan(task, [work_dir]), [StageDirs(work_dir)]).all()]
    seconds = sum(filter(None, known))
    if seconds < 1:
        return _UNKNOWN
    return f", {'about' if None not in known else 'more than'} {duration(seconds)}"
