"""S3 over HTTP: moto's server on this machine, behind a proxy that misbehaves when it is told to."""

from __future__ import annotations

import contextlib
import functools
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
from moto.server import ThreadedMotoServer

from common.secrets import Secret
from stages.store.options import StoreOptions
from tests.helpers.web import QuietHandler, listening

KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}


@dataclass(frozen=True)
class Request:
    """What was asked. `query`: the last value of each name. `path`: decoded, with the bucket."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def operation(self) -> str:
        """As boto3 calls it."""
        names = {
            ("GET", "uploads"): "list_multipart_uploads", ("GET", "list-type"): "list_objects_v2",
            ("GET", "uploadId"): "list_parts", ("POST", "uploads"): "create_multipart_upload",
            ("POST", "uploadId"): "complete_multipart_upload", ("POST", "delete"): "delete_objects",
            ("PUT", "uploadId"): "upload_part", ("DELETE", "uploadId"): "abort_multipart_upload",
        }  # fmt: skip
        found = [names[self.method, name] for name in self.query if (self.method, name) in names]
        return found[0] if found else f"{self.method.lower()}_object"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


When = Callable[[Request], bool]
#: What happens to one request.
Fault = Callable[["Handler"], None]


class S3:
    """`url`: the proxy. `client`: talks to moto's server directly."""

    def __init__(self, server: str) -> None:
        self.server, self.url = server, ""
        self.client = _client(server)
        self.requests: list[Request] = []
        #: How many of them met a fault.
        self.failed = 0
        #: The most requests that were open at the same time.
        self.peak = self._open = 0
        #: Set at the end, so that nothing waits any longer.
        self.over = threading.Event()
        self._faults: list[tuple[When, Fault, list[None]]] = []
        self._lock = threading.Lock()

    def fail(self, fault: Fault, when: When | str = "", times: int = 1) -> None:
        """The next `times` requests of an operation (empty: of any), or for which `when` holds, meet `fault`."""
        chosen = when if callable(when) else lambda request: when in ("", request.operation)
        self._faults.append((chosen, fault, [None] * times))

    def heal(self) -> None:
        self._faults.clear()

    def count(self, operation: str = "") -> int:
        return sum(operation in ("", request.operation) for request in self.requests)

    @contextlib.contextmanager
    def taken(self, request: Request) -> Iterator[Fault | None]:
        """Record a request; yields what is to happen to it."""
        with self._lock:
            self.requests.append(request)
            self._open += 1
            self.peak = max(self.peak, self._open)
            found = next((entry for entry in self._faults if entry[2] and entry[0](request)), None)
            if found is not None:
                found[2].pop()
                self.failed += 1
        try:
            yield found[1] if found is not None else None
        finally:
            with self._lock:
                self._open -= 1


@functools.cache
def _client(server: str) -> Any:
    return boto3.client("s3", endpoint_url=f"http://{server}", **KEYS)  # type: ignore[call-overload]


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    s3: S3
    request_made: Request

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_made = Request(self.command, unquote(parts.path), query, headers, body)
        # A client may have hung up.
        with self.s3.taken(self.request_made) as fault, contextlib.suppress(ConnectionError):
            if fault is not None:
                fault(self)
            else:
                self.answer(self.forward())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def forward(self) -> Answer:
        """Moto's answer."""
        connection = http.client.HTTPConnection(self.s3.server, timeout=60)
        with contextlib.closing(connection):
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")
            }
            connection.request(self.command, self.path, self.request_made.body, headers)
            answer = connection.getresponse()
            body = answer.read()
        hop = ("connection", "transfer-encoding", "date", "server")
        return Answer(answer.status, [pair for pair in answer.getheaders() if pair[0].lower() not in hop], body)

    def answer(self, answer: Answer, cut: int | None = None, chunk: int = 1 << 20, wait_s: float = 0.0) -> None:
        """Send an answer: `cut`: bytes of the body after which the connection ends; in chunks with waits between."""
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name, _ in answer.headers} and answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        body = b"" if self.command == "HEAD" else answer.body[:cut]
        for at in range(0, len(body), chunk):
            self.wfile.write(body[at : at + chunk])
            self.s3.over.wait(wait_s) if wait_s else None
        if cut is not None:
            self.hang_up()


def error(status: int, code: str = "", body: bytes | None = None, **headers: str) -> Fault:
    """An error as S3 words it, or `body`; the request does not arrive."""
    xml = f"<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>{code}</Code><Message>No.</Message></Error>".encode()
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return lambda handler: handler.answer(Answer(status, named, (xml if code else b"") if body is None else body))


def drop(handler: Handler) -> None:
    """The connection ends before the request has arrived."""
    handler.hang_up()


def lose(handler: Handler) -> None:
    """The request is carried out, its answer is lost."""
    handler.forward()
    handler.hang_up()


def cut(after: int) -> Fault:
    return lambda handler: handler.answer(handler.forward(), cut=after)


def slow(chunk: int, wait_s: float) -> Fault:
    """The answer comes `chunk` bytes at a time."""

    def send(handler: Handler) -> None:
        answer = handler.forward()
        time.sleep(wait_s)
        handler.answer(answer, chunk=chunk, wait_s=wait_s)

    return send


def stall(handler: Handler) -> None:
    """No answer, and the connection stays open."""
    handler.s3.over.wait(60)
    handler.hang_up()


def before(action: Callable[[], object], fault: Fault | None = None) -> Fault:
    """Do something, then answer as if nothing had happened, or as `fault` does."""

    def act(handler: Handler) -> None:
        action()
        fault(handler) if fault is not None else handler.answer(handler.forward())

    return act


def after(action: Callable[[], object]) -> Fault:
    """Carry the request out, do something, and lose the answer."""

    def act(handler: Handler) -> None:
        handler.forward()
        action()
        handler.hang_up()

    return act


def at_first() -> When:
    """Holds for every request once: a retry is let through, even one for the rest of a range."""
    seen: set[tuple[str, ...]] = set()
    lock = threading.Lock()

    def is_new(request: Request) -> bool:
        stop = request.headers.get("range", "").rpartition("-")[2]
        what = (request.operation, request.path, *map(str, sorted(request.query.items())), stop)
        with lock:
            known = what in seen
            seen.add(what)
        return not known

    return is_new


def store_options(s3: S3, bucket: str, prefix: str = "runs/store", **changes: Any) -> StoreOptions:
    """A store in the new bucket, behind the proxy."""
    s3.client.create_bucket(Bucket=bucket)
    return StoreOptions(url=Secret.address(f"s3://{bucket}/{prefix}"), s3_endpoint=Secret.address(s3.url), **changes)


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Moto's server, for the block: its host and port. All of a process have the same buckets."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@contextlib.contextmanager
def proxied(server: str) -> Iterator[S3]:
    """A proxy in front of the S3 server at this host and port, for the block."""
    s3 = S3(server)
    with listening(Handler, s3=s3) as s3.url:
        try:
            yield s3
        finally:
            s3.over.set()


@contextlib.contextmanager
def serving() -> Iterator[S3]:
    """Moto's server and a proxy in front of it, for the block."""
    with moto() as server, proxied(server) as s3:
        yield s3
