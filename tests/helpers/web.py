"""A small web server that serves one object, and misbehaves when it is told to."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: What happens to one request. It may answer itself, or return how many bytes of the body are sent before the
#: connection is cut; None: the answer is left to the server.
Fault = Callable[["Handler"], int | None]


class Web:
    """The object at `url`, and the requests for it. Those for its first byte alone are counted apart, as probes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.etag: str | None = '"' + hashlib.md5(data).hexdigest() + '"'
        self.modified: str | None = "Fri, 21 Nov 2025 10:00:00 GMT"
        #: Whether Range is understood, and whether If-Match and If-Unmodified-Since are.
        self.ranges, self.conditions = True, True
        self.length: int | None = None
        #: One is taken for each request that is not a probe, in order of arrival.
        self.faults: deque[Fault] = deque()
        #: The same for probes.
        self.probe_faults: deque[Fault] = deque()
        #: Bytes of bodies that may go out before all answers stall; None: all.
        self.budget: int | None = None
        self.open_again = threading.Event()
        self.lock = threading.Lock()
        self.sent = 0
        self.probes = 0
        self.parts: list[str | None] = []
        #: Their If-Match or If-Unmodified-Since.
        self.demands: list[str | None] = []
        self.paths: list[str] = []
        self.url = ""

    def replace(self, data: bytes) -> None:
        self.data, self.etag = data, '"' + hashlib.md5(data).hexdigest() + '"'
        self.modified = "Fri, 21 Nov 2025 11:00:00 GMT"


class QuietHandler(BaseHTTPRequestHandler):
    """It logs nothing."""

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def do_GET(self) -> None:
        web, asked = self.web, self.headers["Range"]
        probe = asked == "bytes=0-0"
        with web.lock:
            web.paths.append(self.path)
            if probe:
                web.probes += 1
            else:
                web.parts.append(asked)
                web.demands.append(self.headers["If-Match"] or self.headers["If-Unmodified-Since"])
            faults = web.probe_faults if probe else web.faults
            fault = faults.popleft() if faults else None
        cut = fault(self) if fault is not None else None
        if cut != -1:
            self._serve(asked if web.ranges else None, cut)

    def _serve(self, asked: str | None, cut: int | None) -> None:
        web = self.web
        condition = self.headers["If-Match"]
        since = self.headers["If-Unmodified-Since"]
        if web.conditions and ((condition and condition != web.etag) or (since and since != web.modified)):
            self.answer(412)
            return
        length, start, stop = len(web.data), 0, len(web.data)
        if asked is not None:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups()  # type: ignore[union-attr]
            start, stop = int(first), min(int(last) + 1, length)
        self.send_response(200 if asked is None else 206)
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{web.length or length}")
        self.send_header("Content-Length", str(stop - start))
        for name, value in (("ETag", web.etag), ("Last-Modified", web.modified)):
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        body = web.data[start:stop][:cut]
        # A client may hang up on a whole object it did not want.
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body), 64 << 10):
                self._send(body[at : at + (64 << 10)])
        if cut is not None:
            self.hang_up()

    def _send(self, data: bytes) -> None:
        web = self.web
        with web.lock:
            held = web.budget is not None and web.sent + len(data) > web.budget
            if not held:
                web.sent += len(data)
        if held:
            web.open_again.wait(60)
            raise ConnectionError
        self.wfile.write(data)

    def answer(self, status: int, **headers: str) -> int:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        return -1


def status(code: int, **headers: str) -> Fault:
    return lambda handler: handler.answer(code, **headers)


def cut(after: int) -> Fault:
    return lambda handler: after


def stall(until: threading.Event) -> Fault:
    def wait(handler: Handler) -> int:
        until.wait(60)
        handler.hang_up()
        return -1

    return wait


def drip(byte_every_s: float, until: threading.Event, *, headers: bool = False) -> Fault:
    """The body, or with `headers` the headers, a byte at a time: often enough that no read times out."""

    def send(handler: Handler) -> int:
        handler.close_connection = True
        asked = handler.headers["Range"].removeprefix("bytes=")
        start, last = map(int, asked.split("-"))
        body = handler.web.data[start : last + 1]
        head = (
            f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {asked}/{len(handler.web.data)}\r\n"
            f"ETag: {handler.web.etag}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        with contextlib.suppress(OSError):
            handler.connection.sendall(b"" if headers else head)
            for byte in head if headers else body:
                if until.wait(byte_every_s):
                    break
                handler.connection.sendall(bytes([byte]))
        return -1

    return send


def then(action: Callable[[], object]) -> Fault:
    """Do something, then answer as if nothing had happened."""

    def act(handler: Handler) -> None:
        action()

    return act


@contextlib.contextmanager
def serving(data: bytes, path: str = "/shards.tar", tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """A server of `data` on this machine, for the block; with `tls` over https."""
    web = Web(data)
    with listening(Handler, tls, web=web) as address:
        web.url = f"{address}{path}"
        try:
            yield web
        finally:
            web.open_again.set()


@contextlib.contextmanager
def listening(
    handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None, **attributes: object
) -> Iterator[str]:
    """A server on this machine whose handlers have these attributes, for the block; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), attributes))
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
