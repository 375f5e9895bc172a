"""`python -m pipeline manifest [STAGE]`: what `launcher = kubernetes` would apply."""

from __future__ import annotations

import argparse

from common.errors import UserError
from pipeline.commands.why import add_task, find
from pipeline.launchers.base import StageCommand
from pipeline.launchers.jobs import job_name
from pipeline.launchers.kubernetes_manifest import as_yaml, manifest
from pipeline.tasks.stage import Stage

SUMMARY = "print the Kubernetes manifest of a stage, the Job and what it needs; applies nothing"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_task(parser, default="pretrain-phase1")


def run(args: argparse.Namespace) -> int:
    """Print the manifest as YAML. Raises `UserError` for missing settings, or a stage that runs on no cluster."""
    task = find(args.task, args.phase)
    if not isinstance(task, Stage) or not task.is_on_cluster:
        raise UserError(
            f"{args.task} is not run on a cluster; allowed: Precompile, Pretrain, Evaluate, and with [cluster] "
            f"build_nodes above 1 TokenizeCorpus and ShardDataset"
        )
    settings = task.settings.kubernetes
    settings.check(task.settings.cluster)
    # Each submission has a new token, which is in job.json in the stage directory.
    record = {"name": job_name(task.label, task.identity.fingerprint, "token"), "token": "token"}
    work = StageCommand(task.label, task.directory, -1, task.identity.fingerprint, [], task.nodes, task.restarts, None)
    documents = manifest(work, record, settings, task.settings.cluster.master_port)
    print(as_yaml(documents), end="")
    return 0
