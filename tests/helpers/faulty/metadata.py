"""EC2's metadata service, on loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

from tests.helpers.web import QuietHandler

SPOT, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"


class Metadata:
    """A metadata service as Amazon documents IMDSv2: no answer without a token from PUT, 404 while there is no
    notice. `forget` makes its tokens invalid."""

    def __init__(self) -> None:
        self.notices: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.asked: list[tuple[str, int]] = []
        self.url = ""

    def forget(self) -> None:
        self.tokens.clear()

    def asked_for(self, path: str, status: int) -> int:
        return self.asked.count((path, status))


@contextlib.contextmanager
def metadata_service() -> Iterator[Metadata]:
    service = Metadata()

    class Handler(QuietHandler):
        def do_PUT(self) -> None:
            lifetime = int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"])
            assert 1 <= lifetime <= 21600
            service.tokens.add(token := f"token-{len(service.asked)}")
            self.answer(200 if self.path == "/latest/api/token" else 404, token)

        def do_GET(self) -> None:
            if self.headers["X-aws-ec2-metadata-token"] not in service.tokens:
                self.answer(401, "")
            elif self.path in service.notices:
                self.answer(200, service.notices[self.path])
            else:
                self.answer(404, "not found")

        def answer(self, status: int, text: str) -> None:
            service.asked.append((self.path, status))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield service
        server.shutdown()
