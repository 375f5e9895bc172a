"""`python -m pipeline trackers`: sends what MLflow and W&B have not received yet because they were down or slow."""

from __future__ import annotations

import argparse

from common.console import log
from common.errors import UserError
from pipeline.settings.load import load
from pipeline.status.trackers import send, untracked
from pipeline.tasks.bert import BertPhase2
from pipeline.tasks.mnist import MnistMlp

SUMMARY = "upload metrics that MLflow or W&B ([trackers] names) has not received yet"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mnist", action="store_true", help="those of the MLP instead")


def run(args: argparse.Namespace) -> int:
    """Send it; returns 0 if every tracker then has everything. Raises `UserError`."""
    options = load().trackers.options
    if not options.remote:
        raise UserError(f"[trackers] names = {options.names} lists no remote tracker; add mlflow or wandb")
    evaluation = MnistMlp().requires()["evaluate_mlp"] if args.mnist else BertPhase2().requires()["evaluate"]
    has_all = send(evaluation)
    for label in untracked(evaluation):
        log(f"{label}: not sent: it was trained without a tracker ([trackers] names), which notes what is to be sent")
        has_all = False
    if not has_all:
        return 1
    print(f"{', '.join(options.remote)}: complete")
    return 0
