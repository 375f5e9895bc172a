"""Resolve the URL of ready shards: a local file or folder, or a remote object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.addresses import local_path, url_scheme
from common.errors import UserError
from common.hashing import InputHashes, digest
from common.options import option
from common.secrets import Secret, address_identity
from stages.transfer.remote import LeastRate, Remote

_GROUP = "network addresses"


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Transfer settings; they do not affect the result."""

    connections: int = option(
        8, decides=False, group=_GROUP, unit="requests", least=1, most=64, help="parallel requests"
    )
    s3_profile: str = option(
        "", decides=False, group=_GROUP, metavar="NAME",
        help="AWS profile that signs requests to S3; 'default': whatever boto3 finds; left out: unsigned",
    )  # fmt: skip
    s3_endpoint: Secret = option(
        Secret(""), decides=False, group=_GROUP, metavar="ADDRESS", help="another server that speaks S3; left out: AWS"
    )
    low_speed_limit_bytes_per_s: float = option(
        LeastRate.bytes_per_s, decides=False, group=_GROUP, metavar="RATE", least=0,
        help="a slower connection is dropped and retried; 0: never",
    )  # fmt: skip
    low_speed_time_s: float = option(
        LeastRate.time_s, decides=False, group=_GROUP, unit="s", least=1, help="seconds over which that is measured"
    )

    @property
    def least_rate(self) -> LeastRate:
        return LeastRate(self.low_speed_limit_bytes_per_s, self.low_speed_time_s)


@dataclass(frozen=True)
class Fetcher:
    """Handler of a URL scheme."""

    #: Identifies the content behind the URL as well as possible without the network.
    identity: Callable[[Secret, InputHashes], str]
    #: The local file or folder, or the remote object.
    open: Callable[[Secret, Transport], Path | Remote]


def source_identity(url: Secret, hashes: InputHashes) -> str:
    """Identity of a source: the content of a local file or folder, the address of a remote object.

    A finished stage thus needs no network. Raises `UserError`.
    """
    return _fetcher(url).identity(url, hashes)


def source_inputs(url: Secret, sha256: str | None, hashes: InputHashes) -> dict[str, str]:
    """Inputs of a stage: the source's identity and, if given, the required sha256. Raises `UserError`."""
    return {"source": source_identity(url, hashes), **({"sha256": sha256} if sha256 else {})}


def open_source(url: Secret, transport: Transport) -> Path | Remote:
    """The local file or folder behind the URL, or the remote object. Raises `UserError`."""
    return _fetcher(url).open(url, transport)


def _fetcher(url: Secret) -> Fetcher:
    scheme = url_scheme(url)
    if scheme not in FETCHERS:
        allowed = ", ".join(f"{name}://" for name in FETCHERS if name)
        raise UserError(f"cannot fetch {url}: {scheme}:// is unknown; allowed: {allowed} and plain paths")
    return FETCHERS[scheme]


def _source_path(url: Secret) -> Path:
    path = local_path(url)
    if not path.exists():
        raise UserError(f"there is no archive or folder {path}; give a .tar, .tar.gz, .tar.zst or a folder of shards")
    return path


def _local_identity(url: Secret, hashes: InputHashes) -> str:
    path = _source_path(url)
    if not path.is_dir():
        return file_identity(hashes.sha256(path))
    from stages.transfer.shard_import import folder_shards

    shards = folder_shards(path)
    return folder_identity(dict(zip((shard.name for shard in shards), _sha256s(shards, hashes), strict=True)))


def _sha256s(paths: list[Path], hashes: InputHashes) -> list[str]:
    return [file.sha256 for file in hashes.hash(paths)]


def file_identity(sha256: str) -> str:
    """Identity of a local file."""
    return f"sha256:{sha256}"


def folder_identity(sha256s: dict[str, str]) -> str:
    """Identity of a folder of shards, from the sha256 of each by name."""
    return digest(["folder", *(f"{name} {sha256}" for name, sha256 in sorted(sha256s.items()))])


def _open_local(url: Secret, transport: Transport) -> Path:
    return _source_path(url)


def _web_identity(url: Secret, hashes: InputHashes) -> str:
    _require_host(url)
    return address_identity(url.reveal())


def _open_http(url: Secret, transport: Transport) -> Remote:
    from stages.transfer.http import HttpRemote

    _require_host(url)
    return HttpRemote(url, connections=transport.connections)


def _require_host(url: Secret) -> None:
    if not urlsplit(url).hostname:
        raise UserError(f"{url} names no host; write {urlsplit(url).scheme}://host/path")


def _bucket_and_key(url: Secret) -> tuple[str, str]:
    whole = url.reveal().removeprefix("s3://")
    bucket, _, key = whole.partition("/")
    if "@" in bucket:
        raise UserError(f"{url} was given with a login; leave it out, and name a profile of your AWS configuration")
    if not bucket or not key:
        raise UserError(f"{url} is not an object in S3; write s3://bucket/key")
    if key.endswith("/"):
        raise UserError(f"{url} is a folder in S3; give one archive: s3://bucket/key.tar")
    return bucket, key


def _s3_identity(url: Secret, hashes: InputHashes) -> str:
    _bucket_and_key(url)
    return address_identity(url.reveal())


def _open_s3(url: Secret, transport: Transport) -> Remote:
    from stages.transfer.s3 import S3Store

    bucket, key = _bucket_and_key(url)
    store = S3Store(
        bucket,
        profile=transport.s3_profile,
        endpoint=transport.s3_endpoint,
        connections=transport.connections,
    )
    return store.object(key)


_LOCAL, _WEB = Fetcher(_local_identity, _open_local), Fetcher(_web_identity, _open_http)
#: URL scheme ("" for a plain path) → fetcher.
FETCHERS = {"s3": Fetcher(_s3_identity, _open_s3), "https": _WEB, "http": _WEB, "file": _LOCAL, "": _LOCAL}
