"""What asks a run from outside to save, or to save and stop: signals, a file, Amazon's notices."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from common.files import SAVE_REQUEST
from common.process import heeded_signals

if TYPE_CHECKING:
    from requests import Session

#: Where the metadata of an EC2 instance are, as Amazon's own tools name and set it.
ENDPOINT_VARIABLE, _ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254"
#: Seconds between two looks, as Amazon recommends, and for one answer.
_POLL_S, _ANSWER_S = 5.0, 2.0
#: Seconds that a session token is good for: the most there is.
_TOKEN_S = 21600
#: The notices, and whether the instance is taken away, two minutes after the first of them.
_NOTICES = {"spot/instance-action": True, "events/recommendations/rebalance": False}
#: Seconds between two looks for the file.
_LOOK_S = 1.0


class Interruptions:
    """What this worker was asked for. The workers agree on it between them: any of them may have been asked."""

    def __init__(self, output_dir: Path, *, is_root: bool, watches_spot: bool) -> None:
        """The root looks for the file; who `watches_spot` (one worker on a machine) for notices."""
        self.must_stop = False
        self._must_save = False
        self._file = output_dir / SAVE_REQUEST if is_root else None
        self._looked = 0.0
        self._watch = _SpotWatch(self) if watches_spot else None

    def begin(self) -> None:
        """From here on signals and notices count, rather than ending the process."""
        for signum in heeded_signals():
            signal.signal(signum, self._on_signal)
        if self._watch is not None and not self._watch.is_alive():
            self._watch.start()

    def end(self) -> None:
        if self._watch is not None:
            self._watch.over.set()

    def ask(self, *, stop: bool) -> None:
        """Save at the end of the step; or, with `stop`, as soon as possible, and end."""
        if stop:
            self.must_stop = True
        else:
            self._must_save = True

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call. What asked for it is forgotten."""
        asked, self._must_save = self._must_save, False
        return self._take_file() or asked

    def _take_file(self) -> bool:
        if self._file is None or time.monotonic() - self._looked < _LOOK_S:
            return False
        self._looked = time.monotonic()
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        return True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.ask(stop=True)


class _SpotWatch(threading.Thread):
    """Polls the instance's metadata (IMDSv2) for a notice; whatever happens to it, training goes on."""

    def __init__(self, interruptions: Interruptions) -> None:
        super().__init__(name="spot", daemon=True)
        self.over = threading.Event()
        self._interruptions = interruptions
        self._url = os.environ.get(ENDPOINT_VARIABLE, _ENDPOINT).rstrip("/") + "/latest"

    def run(self) -> None:
        from requests import RequestException, Session

        session = Session()
        session.trust_env = False  # the address is this machine's own: no proxy can answer for it
        seen: dict[str, str] = {}
        silent = False
        while not self.over.is_set():
            try:
                for path, stop in _NOTICES.items():
                    notice = self._read(session, path)
                    if notice is not None and seen.get(path) != notice:
                        seen[path] = notice
                        what = "saving and stopping" if stop else "saving, and going on"
                        print(f"notice of {path}: {' '.join(notice.split())}; {what}", flush=True)
                        self._interruptions.ask(stop=stop)
                silent = False
            except RequestException as error:
                if not silent:
                    print(f"no answer from the instance metadata at {self._url}: {error}; trying on", flush=True)
                silent = True
            self.over.wait(_POLL_S)

    def _read(self, session: Session, path: str) -> str | None:
        """The notice at `path`; None: there is none. Raises `RequestException`."""
        url = f"{self._url}/meta-data/{path}"
        answer = session.get(url, timeout=_ANSWER_S)
        if answer.status_code == 401:  # the token is missing, or no longer good
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = session.put(f"{self._url}/api/token", headers=lifetime, timeout=_ANSWER_S)
            token.raise_for_status()
            session.headers["X-aws-ec2-metadata-token"] = token.text
            answer = session.get(url, timeout=_ANSWER_S)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return str(answer.text)
