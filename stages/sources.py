"""What a URL of ready shards stands for: a file or folder of this machine, or an object to fetch."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from stages.intake import folder_shards
from stages.remote import Remote
from trainer.errors import UserError

CONNECTIONS_MAX = 64
_SAMPLE_BYTES = 64 << 10
#: Parameters with which AWS signs an address; they say nothing about what is behind it.
_SIGNATURE = "x-amz-"


@dataclass(frozen=True)
class Transport:
    """How things are fetched; changes nothing about what comes out."""

    #: Parallel requests, 1 to `CONNECTIONS_MAX`.
    connections: int = 8
    #: Profile of the AWS configuration whose credentials sign requests to S3; empty: unsigned.
    s3_profile: str = ""
    #: Address of another server that speaks S3; empty: AWS.
    s3_endpoint: str = ""
    keep_archive: bool = False
    #: Processes that check shards, 1 or more.
    processes: int = 1


def add_transport_options(p: argparse._ActionsContainer) -> None:
    """The options that `transport_of` reads."""
    p.add_argument(
        "--connections", type=int, default=Transport.connections, metavar="N",
        help=f"parallel requests, 1 to {CONNECTIONS_MAX} ({Transport.connections})",
    )  # fmt: skip
    p.add_argument(
        "--s3-profile", default="", metavar="NAME",
        help="AWS profile that signs requests to S3; 'default': whatever boto3 finds; left out: unsigned",
    )  # fmt: skip
    p.add_argument("--s3-endpoint", default="", metavar="ADDRESS", help="another server that speaks S3; left out: AWS")


def transport_of(args: argparse.Namespace) -> Transport:
    """What the options say. Raises `UserError` for a number of connections that is not allowed."""
    if not 1 <= args.connections <= CONNECTIONS_MAX:
        raise UserError(f"--connections is {args.connections}; give 1 to {CONNECTIONS_MAX}")
    return Transport(connections=args.connections, s3_profile=args.s3_profile, s3_endpoint=args.s3_endpoint)


@dataclass(frozen=True)
class Fetcher:
    """How one kind of URL is handled."""

    #: What tells the content behind the URL from any other, as well as can be told without the network.
    identity: Callable[[str], str]
    #: The file or folder of this machine behind the URL, or the object that has to be fetched.
    open: Callable[[str, Transport], Path | Remote]


def source_identity(url: str) -> str:
    """What tells the content behind `url` from any other, cheaply and without the network.

    Raises `UserError` if it cannot be had.
    """
    return _fetcher(url).identity(url)


def source_inputs(url: str, sha256: str | None) -> dict[str, str]:
    """The identity of a source: of a file or folder, its content; of an object in the network, its address, so that
    a finished stage needs no network. Raises `UserError`."""
    return {"source": source_identity(url), **({"sha256": sha256} if sha256 else {})}


def open_source(url: str, transport: Transport) -> Path | Remote:
    """The file or folder of this machine behind the URL, or the object to fetch. Raises `UserError`."""
    return _fetcher(url).open(url, transport)


def _fetcher(url: str) -> Fetcher:
    scheme = urlsplit(url).scheme
    if scheme not in FETCHERS:
        allowed = ", ".join(f"{name}://" for name in FETCHERS if name)
        raise UserError(f"cannot fetch {url}: {scheme}:// is unknown; allowed are {allowed} and plain paths")
    return FETCHERS[scheme]


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise UserError(f"{url} names the host {parts.netloc}; write file:///absolute/path (three slashes)")
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(url)
    if not path.exists():
        raise UserError(f"there is no archive or folder {path}; give a .tar, .tar.gz, .tar.zst or a folder of shards")
    return path


def _local_identity(url: str) -> str:
    """sha256 over names, sizes and both ends of every file: content decides, and terabytes need not be read."""
    path = _local_path(url)
    shards = [(file.name, file) for file in folder_shards(path)] if path.is_dir() else [("", path)]
    return digest_of_ends(shards, _SAMPLE_BYTES)


def digest_of_ends(files: Iterable[tuple[str, Path]], sample_bytes: int) -> str:
    """sha256, in hex, over names, sizes and `sample_bytes` of both ends of every (name, file)."""
    digest = hashlib.sha256()
    for name, file in files:
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as raw:
            digest.update(raw.read(sample_bytes))
            raw.seek(max(0, size - sample_bytes))
            digest.update(raw.read(sample_bytes))
    return digest.hexdigest()


def _open_local(url: str, transport: Transport) -> Path:
    return _local_path(url)


def _public(url: str) -> str:
    """A web address without login, signature and fragment: its identity, and what messages call it."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise UserError(f"{url} names no host; write {parts.scheme}://host/path")
    query = [(k, v) for k, v in parse_qsl(parts.query, keep_blank_values=True) if not k.lower().startswith(_SIGNATURE)]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, urlencode(query), ""))


def _open_http(url: str, transport: Transport) -> Remote:
    from stages.http import HttpRemote

    return HttpRemote(url, _public(url), connections=transport.connections)


def _bucket_and_key(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not bucket or not key:
        raise UserError(f"{url} is no object in S3; write s3://bucket/key")
    if key.endswith("/"):
        raise UserError(f"{url} is a folder in S3; give one archive: s3://bucket/key.tar")
    return bucket, key


def _s3_identity(url: str) -> str:
    return f"s3://{'/'.join(_bucket_and_key(url))}"


def _open_s3(url: str, transport: Transport) -> Remote:
    from stages.s3 import S3Store

    bucket, key = _bucket_and_key(url)
    store = S3Store(
        bucket,
        profile=transport.s3_profile,
        endpoint=transport.s3_endpoint,
        connections=transport.connections,
    )
    return store.object(key)


_LOCAL, _WEB = Fetcher(_local_identity, _open_local), Fetcher(_public, _open_http)
#: URL scheme ("" for a plain path) → fetcher.
FETCHERS = {"s3": Fetcher(_s3_identity, _open_s3), "https": _WEB, "http": _WEB, "file": _LOCAL, "": _LOCAL}
