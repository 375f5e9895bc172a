"""`python -m pipeline tensorboard`: curves of all training runs below the work directory, including running ones."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

from common.command_line import port
from common.errors import LockHeld, UserError
from common.files import disk_errors, read_json, replace_json
from common.process import USER_STOP_SIGNALS, is_ignored
from pipeline.settings.load import load
from pipeline.status.tensorboard import ADDRESS, DIRECTORY
from stages.directory.lock import hold

SUMMARY = "TensorBoard for all training runs below the work directory; luigid shows its address beside each stage"
_RUNS = "runs"
#: Curves of training runs in this work directory and in each night.
_CURVES = ("*/tensorboard", "nights/[0-9]*/*/tensorboard")
#: Seconds between searches for new training runs.
_LOOK_S = 2.0


def link_runs(work_dir: Path) -> None:
    """Make the links in WORK/tensorboard/runs match the training runs that exist. Raises `DiskError`.

    Links, because TensorBoard would otherwise walk through all shards and checkpoints, and see those of `latest` twice.
    """
    runs = work_dir / DIRECTORY / _RUNS
    with disk_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
        found = {path.parent for pattern in _CURVES for path in work_dir.glob(pattern)}
        wanted = {"-".join(path.relative_to(work_dir).parts).removeprefix("nights-"): path for path in found}
        for link in runs.iterdir():
            if link.name not in wanted:
                link.unlink()
        for name, path in wanted.items():
            if not (runs / name).is_symlink():
                (runs / name).symlink_to(os.path.relpath(path / "tensorboard", runs))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; anyone who reaches it sees the curves (%(default)s)"
    )
    parser.add_argument("--port", type=port(0), default=6006, help="0: any free port (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises `UserError`."""
    directory = (load().work_dir / DIRECTORY).resolve()  # of a night: that of all nights
    work_dir = directory.parent
    over = threading.Event()
    for signum in USER_STOP_SIGNALS:
        if not is_ignored(signum):
            signal.signal(signum, lambda *_: over.set())
    try:
        with hold(directory):
            link_runs(work_dir)
            url = _launch(directory / _RUNS, args.host, args.port)
            with disk_errors(directory):
                replace_json(directory / ADDRESS, {"url": url})
            print(f"TensorBoard: {url} (stop it with Ctrl-C)", flush=True)
            while not over.wait(_LOOK_S):
                link_runs(work_dir)
            (directory / ADDRESS).unlink(missing_ok=True)
    except LockHeld as error:
        where = (read_json(directory / ADDRESS) or {}).get("url", "an address not known yet")
        raise UserError(f"TensorBoard for {work_dir} is already running, at {where} ({error})") from None
    return 0


def _launch(logdir: Path, host: str, port: int) -> str:
    from tensorboard.program import TensorBoard, TensorBoardServerException

    board = TensorBoard()
    board.configure(logdir=str(logdir), host=host, port=port)
    try:
        return str(board.launch())
    except TensorBoardServerException as error:
        raise UserError(f"TensorBoard cannot listen on {host}:{port}: {error.msg}; give another --port") from None
