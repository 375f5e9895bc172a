"""Download one object behind a URL to a complete, verified file; an interrupted download is resumed."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from common.errors import UserError
from common.files import rename_durably
from stages.directory.manifest import StageDirectory
from stages.transfer.partial import PART, Span, State
from stages.transfer.ranges import Transfer, Tries
from stages.transfer.remote import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, Changed, LeastRate, Remote, Transient, Version

#: Attempts at a download whose object keeps changing.
_VERSIONS_MAX = 3
_HASHED_BYTES = 4 << 20


def fetch(
    remote: Remote,
    work: StageDirectory,
    final: Path,
    *,
    connections: int,
    least_rate: LeastRate,
    sha256: str | None,
    begin: Callable[[Version, int, bool], None],
) -> Version:
    """Download the object behind `remote` to `final`, durably, resuming a partial download in `work`.

    `begin(version, missing, is_same)` is called before the download with the number of missing bytes and whether the
    version is the previous run's; it may raise.

    Raises `UserError`: no such object, no access, too many failures, a sha256 mismatch, or an object that keeps
    changing.
    """
    if final.exists():
        before = State.read(work.path)
        if before is not None and (not before.refused or before.version.is_same_as(look(remote, least_rate))):
            return before.version
        _say(f"note: {remote.url} is no longer what {final.name} was fetched from; starting over")
        final.unlink()
    for _ in range(_VERSIONS_MAX):
        state = _resumed(remote, work.path, least_rate, begin)
        try:
            if state.bytes < state.version.length:
                Transfer(remote, work, state, connections, least_rate).run()
        except Changed as error:
            _say(f"note: {remote.url} was changed while it was fetched ({error}); starting over")
            (work.path / PART).unlink()
            continue
        if sha256 is not None:
            try:
                require_sha256(work.path / PART, remote.url, work, sha256)
            except UserError:
                (work.path / PART).unlink()  # so that the next run downloads it again
                raise
        rename_durably(work.path / PART, final)
        return state.version
    raise UserError(f"{remote.url} was changed {_VERSIONS_MAX} times while it was fetched; try again once it is stable")


def look(remote: Remote, least_rate: LeastRate) -> Version:
    """Query the current version of `remote`, with retries; raises `UserError`."""
    tries = Tries(remote.url, threading.Event(), lambda line: _say(f"note: {line}"))
    while True:
        try:
            return _within(least_rate, remote.head)
        except Transient as error:
            tries.failed(error)


def _within(least_rate: LeastRate, ask: Callable[[], Version]) -> Version:
    """Call `ask` under a deadline; raises `Transient` when it expires.

    The read timeout restarts with each byte, so it does not catch a server that sends its headers one by one.
    """
    if not least_rate.bytes_per_s:
        return ask()
    # A daemon thread: an executor would wait for a stalled request, also when the process exits.
    answer: Future[Version] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    limit_s = CONNECT_TIMEOUT_S + READ_TIMEOUT_S + least_rate.time_s
    try:
        return answer.result(timeout=limit_s)
    except TimeoutError:
        raise Transient(f"no whole answer in {limit_s:g} s") from None


def _resumed(
    remote: Remote, directory: Path, least_rate: LeastRate, begin: Callable[[Version, int, bool], None]
) -> State:
    """The partial download of the object's current version; a complete one needs no request."""
    before, part = State.read(directory), directory / PART
    has_part = part.exists()
    if before is not None and has_part and before.bytes == before.version.length and not before.refused:
        return before
    version = look(remote, least_rate)
    is_same = before is not None and before.version.is_same_as(version)
    have: list[Span] = []
    if before is not None and is_same and has_part and version.resumable:
        have = before.have
    elif before is not None and has_part and before.have:
        changed = f"it has changed ({before.version} → {version})"
        why = changed if version.resumable else "the server cannot send just the rest"
        _say(f"note: {remote.url}: {why}; starting over")
    if not version.resumable:
        what = "sends no parts" if not version.ranges else "names no version (ETag, Last-Modified)"
        _say(f"note: {remote.url}: the server {what}, so one connection fetches it, and starts over if cut off")
    state = State(remote.url, version, have)
    if not have:
        part.unlink(missing_ok=True)
    begin(version, version.length - state.bytes, is_same)
    state.write(directory)
    return state


def require_sha256(path: Path, name: str, work: StageDirectory, sha256: str) -> None:
    """Verify a file's sha256, with a progress bar in `work`; raises `UserError` on a mismatch."""
    if path.is_dir():
        raise UserError(f"{name} is a folder, which has no sha256; omit the sha256, or give an archive")
    digest = hashlib.sha256()
    with path.open("rb") as file, work.progress("check sha256", path.stat().st_size, "B") as bar:
        while data := file.read(_HASHED_BYTES):
            digest.update(data)
            bar.update(len(data))
    if digest.hexdigest() != sha256:
        raise UserError(
            f"{name} has the sha256 {digest.hexdigest()}, not the expected {sha256}; check the address and the sha256"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
