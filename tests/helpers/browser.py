"""A real browser for tests: Chromium, controlled over its debugging pipe.

`python -m tests.helpers.browser PAGE.html OUT` takes pictures of a page at two widths, light and dark.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (390, 1280)


def find() -> str | None:
    """The browser, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Messages are JSON and a zero byte, written to the browser's descriptor 3 and read from its 4."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._id = write, read, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        os.write(
            self._write, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._next()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has gone"
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Show `page` in a window of that width, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 800
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    program = find()
    assert program is not None
    (their_read, write), (read, their_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        words = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
                 "--disable-gpu", *(["--no-sandbox"] if os.getuid() == 0 else [])]  # fmt: skip
        # bash gives the pipes the numbers that the browser expects; a plain sh supports only descriptors below 10.
        shell = ["bash", "-c", f'exec "$@" 3<&{their_read} 4>&{their_write}', "bash", *words]
        process = subprocess.Popen(shell, pass_fds=(their_read, their_write), stderr=subprocess.DEVNULL)
        os.close(their_read)
        os.close(their_write)
        try:
            yield Browser(write, read)
        finally:
            os.close(write)
            os.close(read)
            process.terminate()
            process.wait(timeout=20)


def main() -> None:
    page, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    with browser() as tab:
        for width in WIDTHS:
            for dark in (False, True):
                tab.open(page, width=width, dark=dark)
                (out / f"{width}-{'dark' if dark else 'light'}.png").write_bytes(tab.picture())


if __name__ == "__main__":
    main()
