"""torchft: its lighthouse and --groups replica groups of one worker each, all kept running: what dies is restarted at
once, while the other groups continue. Takes the options of torchft_group.py, which trains."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common.process import available_cores, die_with_parent, free_port

#: How long to wait for a group that died. The default is 5 s; torchft's authors find 1 s enough, as a group sends a
#: heartbeat every 0.1 s (its issue 35).
HEARTBEAT_TIMEOUT_MS = 1000


def keep_running(lighthouse: list[str], groups: dict[str, list[str]]) -> None:
    """Keep all running until every group has ended well."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while groups:
            for name, command in {"lighthouse": lighthouse, **groups}.items():
                code = running[name].poll() if name in running else -1
                if code == 0 and name in groups:
                    del groups[name]
                elif code is not None:
                    print(f"{time.time():.1f} {name} starts", flush=True)
                    running[name] = subprocess.Popen(
                        command, preexec_fn=functools.partial(die_with_parent, os.getpid())
                    )
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.kill()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--groups", type=int, required=True)
    args, options = p.parse_known_args()
    port, server = free_port(), shutil.which("torchft_lighthouse", path=Path(sys.executable).parent)
    if server is None:
        sys.exit("error: torchft is not installed")
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
    os.environ.setdefault("RUST_LOG", "warn")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // args.groups)))
    lighthouse = [
        *(server, f"--bind=[::]:{port}", "--min_replicas=1", "--join_timeout_ms=10000"),
        f"--heartbeat_timeout_ms={HEARTBEAT_TIMEOUT_MS}",
    ]
    module = [sys.executable, "-m", "benchmarks.references.torchft_group", f"--groups={args.groups}"]
    groups = {f"group {group}": [*module, f"--group={group}", *options] for group in range(args.groups)}
    keep_running(lighthouse, groups)


if __name__ == "__main__":
    main()
