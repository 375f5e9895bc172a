"""A stand-in for the Hugging Face Hub on this machine: as much of its HTTP API as publishing and reading a model needs.

Modelled on what `huggingface_hub`, which is the real library here, sends and expects. Large files come by LFS, in one
piece or in parts, or by Xet, if they are one uncompressed file of at most 64 MB. A model card gets those of the Hub's
checks that its documentation states; what else the Hub checks cannot be known here. Commits take effect whole.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from tests.helpers.web import QuietHandler, listening

#: Tokens: one that may write everywhere, and one that may read.
WRITER, READER = "hf_standInWriterToken", "hf_standInReaderToken"
#: Some of the Hub's licences and tasks.
LICENCES = {"apache-2.0", "mit", "cc-by-sa-4.0", "unknown", "other"}
TASKS = {"fill-mask", "text-classification"}
#: Environment variable with which Xet's client sends chunks as they are.
NO_COMPRESSION = {"HF_XET_XORB_COMPRESSION_POLICY": "none"}
#: Whether a fault is meant for a request of this method and path.
When = Callable[[str, str], bool]


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    #: Summaries, oldest first.
    commits: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def sha(self) -> str:
        content = json.dumps([self.commits, {name: _git_oid(data) for name, data in sorted(self.files.items())}])
        return hashlib.sha1(content.encode()).hexdigest()


class Hub:
    """`url`: for HF_ENDPOINT. `part_bytes`: the part size of LFS uploads; None: in one piece."""

    def __init__(self, part_bytes: int | None) -> None:
        self.url, self.part_bytes = "", part_bytes
        self.repositories: dict[str, Repository] = {}
        #: Large files by sha256, whether a commit refers to them or not, and the parts of uploads under way.
        self.large: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        #: Of a Xet upload under way.
        self.chunks = bytearray()
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.lock = threading.Lock()
        self._faults: list[tuple[When, Callable[[Handler], None], list[None]]] = []

    def fail(self, when: When, fault: Callable[[Handler], None], times: int = 1) -> None:
        self._faults.append((when, fault, [None] * times))

    def fault_of(self, method: str, path: str) -> Callable[[Handler], None] | None:
        with self.lock:
            self.requests.append((method, path))
            for when, fault, left in self._faults:
                if left and when(method, path):
                    left.pop()
                    return fault
        return None

    def count(self, method: str, pattern: str) -> int:
        return sum(found == method and re.search(pattern, path) is not None for found, path in self.requests)


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers["Content-Length"] or 0)) or self._chunks()
        fault = self.hub.fault_of(self.command, path)
        with contextlib.suppress(ConnectionError):  # a client may have hung up
            if fault is not None:
                return fault(self)
            for methods, pattern, handle in ROUTES:
                if self.command in methods and (found := re.fullmatch(pattern, path)):
                    return handle(self, *found.groups())
            self.answer(404, {"error": f"the stand-in does not know {self.command} {path}"})

    do_GET = do_HEAD = do_PUT = do_POST = _serve

    def _chunks(self) -> bytes:
        """A body of unknown length."""
        data = b""
        while self.headers["Transfer-Encoding"] == "chunked" and (size := int(self.rfile.readline(), 16)):
            data += self.rfile.read(size)
            self.rfile.readline()
        return data

    def answer(self, status: int, content: Any = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def token(self) -> str:
        return (self.headers["Authorization"] or "").removeprefix("Bearer ")

    def may_write(self) -> bool:
        """If not, the request has been answered."""
        self.hub.tokens.add(self.token())
        if self.token() not in (WRITER, READER):
            self.answer(401, {"error": "Invalid"}, X_Error_Message="Invalid credentials in Authorization header")
        elif self.token() == READER:
            self.answer(403, {"error": "Forbidden"}, X_Error_Message="You don't have the rights to write there")
        return self.token() == WRITER

    # The API.

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self.may_write():
            return
        with self.hub.lock:
            exists = name in self.hub.repositories
            if not exists:
                self.hub.repositories[name] = Repository(asked.get("visibility") == "private")
        self.answer(409 if exists else 200, {"url": f"{self.hub.url}/{name}"})

    def info(self, name: str, _revision: str | None = None) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        siblings = [{"rfilename": path, "size": len(data)} for path, data in repository.files.items()]
        self.answer(200, {"id": name, "sha": repository.sha, "private": repository.private, "siblings": siblings})

    def tree(self, name: str) -> None:
        files = self.hub.repositories[name].files
        entries = [{"type": "file", "path": p, "oid": _git_oid(d), "size": len(d)} for p, d in files.items()]
        self.answer(200, entries)

    def validate(self) -> None:
        errors = [{"message": message} for message in card_errors(json.loads(self.body)["content"])]
        if self.headers["Accept"] == "text/plain":
            self.answer(400 if errors else 200, "".join(f"Error: {one['message']}\n" for one in errors).encode())
        else:
            self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, name: str) -> None:
        if not self.may_write():
            return
        files, there = json.loads(self.body)["files"], self.hub.repositories[name].files
        for file in files:
            large = file["path"].endswith(".safetensors") or file["size"] > 10_000_000
            data = there.get(file["path"])
            file |= {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            # As on the Hub: the oid of a regular file is git's, that of a large one its sha256.
            oid = None if data is None else hashlib.sha256(data).hexdigest() if large else _git_oid(data)
            file |= {} if oid is None else {"oid": oid}
        self.answer(200, {"files": files})

    def lfs_batch(self, name: str) -> None:
        if not self.may_write():
            return
        objects = json.loads(self.body)["objects"]
        for one in objects:
            if one["oid"] in self.hub.large:
                continue
            place, header = f"{self.hub.url}/lfs/{one['oid']}", dict[str, str]()
            if self.hub.part_bytes is not None and one["size"] > self.hub.part_bytes:
                count = -(-one["size"] // self.hub.part_bytes)
                header = {str(number): f"{place}/{number}" for number in range(1, count + 1)}
                header["chunk_size"] = str(self.hub.part_bytes)
            upload = {"href": f"{place}/complete" if header else place, "header": header}
            one["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/verify"}}
        self.answer(200, {"transfer": "multipart", "objects": objects})

    def put_large(self, oid: str) -> None:
        """Storage refuses what does not have the announced sha256."""
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.answer(400, {"error": "BadDigest"})
            return
        self.hub.large[oid] = self.body
        self.answer(200, {})

    def put_part(self, oid: str, number: str) -> None:
        self.hub.parts.setdefault(oid, {})[int(number)] = self.body
        self.answer(200, {}, ETag=f'"{hashlib.md5(self.body).hexdigest()}"')

    def complete_parts(self, oid: str) -> None:
        parts = self.hub.parts.pop(oid)
        self.body = b"".join(parts[part["partNumber"]] for part in json.loads(self.body)["parts"])
        self.put_large(oid)

    def verify(self) -> None:
        asked = json.loads(self.body)
        self.answer(200 if len(self.hub.large.get(asked["oid"], b"")) == asked["size"] else 404, {})

    def commit(self, name: str) -> None:
        if not self.may_write():
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        repository = self.hub.repositories[name]
        files, summary = dict(repository.files), ""
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    summary = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.hub.large:
                        self.answer(400, {"error": f"{value['path']} was not uploaded"})
                        return
                    files[value["path"]] = self.hub.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case other:
                    self.answer(400, {"error": f"the stand-in does not know {other}"})
                    return
        repository.files = files
        repository.commits.append(summary)
        place = f"{self.hub.url}/{name}/commit/{repository.sha}"
        self.answer(200, {"commitUrl": place, "commitOid": repository.sha})

    def xet_token(self, name: str) -> None:
        if self.may_write():
            self.answer(200, {"casUrl": f"{self.hub.url}/cas", "accessToken": "xet", "exp": int(time.time()) + 3600})

    def put_xorb(self, _hash: str) -> None:
        """Chunks after 8-byte headers: version, length (3 bytes), compression, uncompressed length (3 bytes)."""
        data, at = b"", 0
        while at < len(self.body) and self.body[at] == 0:
            length, compression = int.from_bytes(self.body[at + 1 : at + 4], "little"), self.body[at + 4]
            assert compression == 0, f"the stand-in reads no compression: {NO_COMPRESSION}"
            data += self.body[at + 8 : at + 8 + length]
            at += 8 + length
        self.hub.chunks += data
        self.answer(200, {"was_inserted": True})

    def put_shard(self) -> None:
        """Says which chunks make up which files. Here files come one at a time."""
        self.hub.large[hashlib.sha256(self.hub.chunks).hexdigest()] = bytes(self.hub.chunks)
        self.hub.chunks.clear()
        self.answer(200, {"result": 1})

    def resolve(self, name: str, path: str) -> None:
        repository = self.hub.repositories[name]
        data = repository.files.get(path)
        if data is None:
            self.answer(404, {}, X_Error_Code="EntryNotFound")
            return
        etag = hashlib.sha256(data).hexdigest()
        self.answer(200, data, ETag=f'"{etag}"', X_Repo_Commit=repository.sha, X_Linked_Size=str(len(data)))


_NAME = r"([\w.-]+/[\w.-]+)"
#: Methods, path, handler.
ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("POST",), "/api/repos/create", Handler.create),
    (("GET",), f"/api/models/{_NAME}(?:/revision/([^/]+))?", Handler.info),
    (("GET",), f"/api/models/{_NAME}/tree/[^/]+", Handler.tree),
    (("POST",), "/api/validate-yaml", Handler.validate),
    (("POST",), f"/api/models/{_NAME}/preupload/main", Handler.preupload),
    (("POST",), rf"/{_NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (("PUT",), "/lfs/([0-9a-f]{64})", Handler.put_large),
    (("PUT",), r"/lfs/([0-9a-f]{64})/(\d+)", Handler.put_part),
    (("POST",), "/lfs/([0-9a-f]{64})/complete", Handler.complete_parts),
    (("POST",), "/lfs/verify", Handler.verify),
    (("POST",), f"/api/models/{_NAME}/commit/main", Handler.commit),
    (("GET",), f"/api/models/{_NAME}/xet-write-token/main", Handler.xet_token),
    (("POST",), "/cas/v1/xorbs/default/([0-9a-f]{64})", Handler.put_xorb),
    (("POST",), "/cas/v1/shards", Handler.put_shard),
    (("GET", "HEAD"), f"/{_NAME}/resolve/[^/]+/(.+)", Handler.resolve),
]


def card_errors(content: str) -> list[str]:
    """What the Hub's documentation of model cards does not allow in this one."""
    found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    data = yaml.safe_load(found[1]) if found else None
    if not isinstance(data, dict):
        return ["there is no YAML metadata"]
    errors = []
    if (licence := data.get("license")) not in {*LICENCES, None}:
        errors.append(f'"license" must be one of {sorted(LICENCES)}, not {licence}')
    if (task := data.get("pipeline_tag")) not in {*TASKS, None}:
        errors.append(f'"pipeline_tag" {task} is not known')
    languages = data.get("language", [])
    for language in [languages] if isinstance(languages, str) else languages:
        if not re.fullmatch("[a-z]{2,3}", language):
            errors.append(f'"language" must be an ISO 639 code, not {language}')
    for name in ("tags", "datasets"):
        if not all(isinstance(one, str) for one in data.get(name, [])):
            errors.append(f'"{name}" must be an array of strings')
    results = [result for model in data.get("model-index", []) for result in model["results"]]
    return errors + [f"{result} is no result" for result in results if not _is_result(result)]


def _is_result(result: Any) -> bool:
    """Whether it has a task, a data set, and metrics with numbers."""
    has_all = result["task"]["type"] in TASKS and result["dataset"]["type"] and result["dataset"]["name"]
    return bool(has_all) and all(one["type"] and isinstance(one["value"], int | float) for one in result["metrics"])


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def serving(part_bytes: int | None = None) -> Iterator[Hub]:
    """The stand-in, for the block."""
    hub = Hub(part_bytes)
    with listening(Handler, hub=hub) as hub.url:
        yield hub
