"""A stand-in for W&B's server, which no machine here can reach: as much of its API as a run needs.

The client is the real one: it asks which lines of a run's history the server has, and sends lines with the offset at
which they belong.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.web import QuietHandler, listening

KEY = "0123456789abcdef" * 3


@dataclass
class OnlineRun:
    """What the server knows of a run."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [line["_step"] for line in self.history]

    def bucket(self) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        tail = json.dumps([json.dumps(line) for line in self.history[-1:]])
        return {
            "id": self.name, "name": self.name, "displayName": self.name, "description": "", "sweepName": None,
            "project": project, "config": json.dumps(self.config), "summaryMetrics": json.dumps(self.summary),
            "logLineCount": 0, "historyLineCount": len(self.history), "eventsLineCount": 0, "historyTail": tail,
            "eventsTail": "[]", "tags": [], "notes": None, "wandbConfig": json.dumps({"t": 1}),
        }  # fmt: skip


class OnlineServer:
    """`runs`, by id; `is_down`: every request is refused."""

    def __init__(self) -> None:
        self.runs: dict[str, OnlineRun] = {}
        self.is_down = False
        self.url = ""

    def query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"(?:query|mutation) (\w+)", query)
        name = variables.get("name")
        match found and found[1]:
            case "RunResumeStatus":
                known = self.runs.get(str(name))
                entity = {"id": "e", "name": "e"}
                bucket = known.bucket() if known else None
                return {"model": {"id": "p", "name": "p", "entity": entity, "bucket": bucket}}
            case "UpsertBucket":
                inserted = name not in self.runs
                run = self.runs.setdefault(str(name), OnlineRun(str(name)))
                if variables.get("config"):
                    run.config = json.loads(variables["config"])
                return {"upsertBucket": {"bucket": run.bucket(), "inserted": inserted}}
            case "Viewer":
                viewer = {"id": "v", "entity": "e", "username": "u", "email": "", "flags": "{}", "teams": {"edges": []}}
                return {"viewer": viewer}
            case "CreateRunFiles":
                files = [{"name": one, "uploadUrl": f"{self.url}/{one}"} for one in variables["files"]]
                return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
        return {}

    def stream(self, run: OnlineRun, said: dict[str, Any]) -> None:
        for name, part in said.get("files", {}).items():
            lines = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                run.history[part["offset"] :] = lines
            elif name == "wandb-summary.json":
                run.summary = lines[-1]
        if said.get("complete"):
            run.exit_codes.append(said["exitcode"])


class _Handler(QuietHandler):
    online: OnlineServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.online.is_down:
            return self._answer(503, {})
        said = json.loads(body or b"{}")
        parts = self.path.split("/")
        if self.path.endswith("/graphql"):
            self._answer(200, {"data": self.online.query(said["query"], said.get("variables") or {})})
        elif parts[-1] == "file_stream":
            self.online.stream(self.online.runs[parts[-2]], said)
            self._answer(200, {})
        else:
            self._answer(404, {})

    def do_PUT(self) -> None:
        """A file of the run, which these tests do not look at."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(200, {})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def online_server() -> Iterator[OnlineServer]:
    online = OnlineServer()
    with listening(_Handler, online=online) as online.url:
        yield online
