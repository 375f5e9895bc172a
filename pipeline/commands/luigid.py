"""`python -m pipeline luigid`: Luigi's central scheduler, on loopback, with the retries of luigi.cfg and metrics."""

from __future__ import annotations

import argparse
import os

from luigi.cmdline import luigid
from luigi.configuration import get_config

from common.command_line import port
from common.errors import UserError
from common.files import disk_errors
from pipeline.settings.load import load

SUMMARY = "Luigi's central scheduler: what is running, how far along, and Prometheus metrics at /metrics"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; anyone who can reach it can stop running tasks (%(default)s)",
    )
    parser.add_argument("--port", type=port(1), default=8082, help="(%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM; the state is saved in WORK/luigid.pickle for the next start. Raises `UserError`."""
    config, work_dir = get_config(), load().work_dir
    state = work_dir / "luigid.pickle"
    with disk_errors(state):
        work_dir.mkdir(parents=True, exist_ok=True)
    if not os.access(state if state.exists() else work_dir, os.W_OK):
        raise UserError(f"cannot write {state}: Permission denied; choose another --Run-work-dir, or change its owner")
    if not config.has_option("scheduler", "metrics_collector"):
        config.set("scheduler", "metrics_collector", "prometheus")
    path = str(state).replace("%", "%%")  # luigi puts it into its settings, where % begins a reference
    try:
        luigid(["--address", args.host, "--port", str(args.port), "--state-path", path])
    except OSError as error:
        if error.filename is not None:
            raise
        raise UserError(
            f"cannot listen on {args.host}, port {args.port}: {error.strerror}; stop what listens there (another "
            f"luigid can be used as it is), or give another --host or --port"
        ) from None
    return 0
