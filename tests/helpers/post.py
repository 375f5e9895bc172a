"""A mail server and a webhook server on 127.0.0.1, and what nights have sent to them."""

from __future__ import annotations

import contextlib
import email
import json
import socketserver
import threading
from collections.abc import Iterator
from email.message import Message
from http.server import ThreadingHTTPServer
from typing import Any

from tests.helpers.web import QuietHandler

SETTINGS = """
[email]
receiver = someone@example.org, other@example.org
[smtp]
host = 127.0.0.1
port = {smtp}
no_tls = true
[nights]
keep = 2
webhook = http://127.0.0.1:{http}/hook
[worker]
keep_alive = true
wait_interval = 0.1
[scheduler]
retry_count = 2
retry_delay = 0.1
prune_on_get_work = true
"""


class Post:
    """A mail and a webhook server, and what they have received. `refusals`: the statuses the webhook answers first."""

    def __init__(self, smtp: int, http: int) -> None:
        self.smtp, self.http = smtp, http
        self.mails: list[tuple[list[str], Message]] = []
        self.hooks: list[dict[str, Any]] = []
        self.refusals: list[int] = []

    def subjects(self) -> list[str]:
        return [str(mail["Subject"]) for _, mail in self.mails]


@contextlib.contextmanager
def receiving() -> Iterator[Post]:
    """Both servers, until the block ends."""

    class Smtp(socketserver.StreamRequestHandler):
        """As much of RFC 5321 as a client with one mail to send needs."""

        def handle(self) -> None:
            recipients: list[str] = []
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline().decode().strip():
                word = line.split()[0].upper()
                if word == "RCPT":
                    recipients.append(line.partition("<")[2].partition(">")[0])
                if word == "DATA":
                    self.wfile.write(b"354 go on\r\n")
                    body = b"".join(iter(self.rfile.readline, b".\r\n"))
                    received.mails.append((recipients, email.message_from_bytes(body)))
                self.wfile.write(b"221 bye\r\n" if word == "QUIT" else b"250 fine\r\n")
                if word == "QUIT":
                    return

    class Hook(QuietHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            facts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = received.refusals.pop(0) if received.refusals else 204
            if status == 204:
                received.hooks.append(facts)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with contextlib.ExitStack() as servers:
        mail = servers.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Smtp))
        hook = servers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Hook))
        received = Post(mail.server_address[1], hook.server_port)
        for server in (mail, hook):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.callback(server.shutdown)
        yield received
