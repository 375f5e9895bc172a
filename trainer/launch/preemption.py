"""Requests to save, or to save and stop: signals, a file, EC2 spot notices."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from common.console import print_line
from common.files import SAVE_REQUEST
from common.process import heeded_signals, save_when_parent_dies

if TYPE_CHECKING:
    from requests import Session

#: Address of the EC2 instance metadata, and the variable by which Amazon's own tools override it.
ENDPOINT_VARIABLE, _ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254"
#: Seconds between polls, as Amazon recommends, and the timeout of one request.
_POLL_S, _ANSWER_S = 5.0, 2.0
#: Lifetime of a session token in seconds: the maximum.
_TOKEN_S = 21600
#: Notice → whether the instance will be reclaimed (two minutes later).
_NOTICES = {"spot/instance-action": True, "events/recommendations/rebalance": False}
#: Seconds between two checks for the file.
_FILE_POLL_S = 1.0


#: Set once this process was asked to stop by a signal.
signalled = threading.Event()


class Requests(Protocol):
    """What this worker is asked to do at the end of a step; the loop combines the requests of all workers."""

    @property
    def must_stop(self) -> bool: ...
    def begin(self) -> None: ...
    def take_save(self) -> bool: ...


class Interruptions:
    """The requests this worker has received. The loop combines those of all workers, since any may receive one."""

    def __init__(self, output_dir: Path, *, is_root: bool, watches_spot: bool, watches_parent: bool = False) -> None:
        """The root polls for the file; one worker per machine (`watches_spot`) polls for spot notices.
        `watches_parent`: the death of what started this process is a request to stop, not this process's end. Set
        it only if all workers are on this machine: others would agree to a stop that nobody there asked for."""
        self.must_stop = False
        self._must_save = False
        self._file = output_dir / SAVE_REQUEST if is_root else None
        self._looked = 0.0
        #: Whether it was said that the file cannot be removed.
        self._refused = False
        self._watch = _SpotWatch(self) if watches_spot else None
        self._watches_parent = watches_parent

    def begin(self) -> None:
        """From here on signals are requests instead of ending the process, and notices are polled."""
        for signum in heeded_signals():
            signal.signal(signum, self._on_signal)
        if self._watches_parent:
            save_when_parent_dies()
            self._watches_parent = False
        if self._watch is not None and not self._watch.is_alive():
            if self._watch.ident is not None:  # it has ended, and a thread cannot be started twice
                self._watch = _SpotWatch(self)
            self._watch.start()

    def end(self) -> None:
        if self._watch is not None:
            self._watch.over.set()

    def ask(self, *, stop: bool) -> None:
        """Request a checkpoint at the end of the step; with `stop`, as soon as possible, and then exit."""
        if stop:
            self.must_stop = True
        else:
            self._must_save = True

    def take_save(self) -> bool:
        """Whether a checkpoint was requested since the last call; clears the request."""
        asked = self._must_save
        if asked:  # else another thread may just be asking
            self._must_save = False
        return self._take_file() or asked

    def _take_file(self) -> bool:
        if self._file is None or time.monotonic() - self._looked < _FILE_POLL_S:
            return False
        self._looked = time.monotonic()
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            if not self._refused:
                print_line(
                    f"{self._file} asks for a checkpoint, but cannot be removed: {error.strerror}; remove it by hand"
                )
            self._refused = True
            return False
        return True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        signalled.set()
        self.ask(stop=True)


class _SpotWatch(threading.Thread):
    """Polls the instance metadata (IMDSv2) for notices; its failures do not affect training."""

    def __init__(self, interruptions: Interruptions) -> None:
        super().__init__(name="spot", daemon=True)
        self.over = threading.Event()
        self._interruptions = interruptions
        self._url = os.environ.get(ENDPOINT_VARIABLE, _ENDPOINT).rstrip("/") + "/latest"

    def run(self) -> None:
        from requests import RequestException, Session

        session = Session()
        session.trust_env = False  # link-local address: not through a proxy
        seen: dict[str, str] = {}
        silent = False
        while not self.over.is_set():
            try:
                for path, stop in _NOTICES.items():
                    notice = self._read(session, path)
                    if notice is not None and seen.get(path) != notice:
                        seen[path] = notice
                        self._interruptions.ask(stop=stop)
                        what = "saving and stopping" if stop else "saving and continuing"
                        print_line(f"notice of {path}: {' '.join(notice.split())}; {what}")
                silent = False
            except RequestException as error:
                if not silent:
                    print_line(f"no answer from the instance metadata at {self._url}: {error}; still trying")
                silent = True
            self.over.wait(_POLL_S)

    def _read(self, session: Session, path: str) -> str | None:
        """The notice at `path`; None: there is none. Raises `RequestException`."""
        url = f"{self._url}/meta-data/{path}"
        answer = session.get(url, timeout=_ANSWER_S)
        if answer.status_code == 401:  # no token yet, or it has expired
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = session.put(f"{self._url}/api/token", headers=lifetime, timeout=_ANSWER_S)
            token.raise_for_status()
            session.headers["X-aws-ec2-metadata-token"] = token.text
            answer = session.get(url, timeout=_ANSWER_S)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return str(answer.text)
