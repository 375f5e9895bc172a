"""How a store is reached. None of this affects a result."""

from __future__ import annotations

from dataclasses import dataclass

from common.addresses import local_path, url_scheme
from common.errors import UserError
from common.options import check, option
from common.secrets import Secret

#: Server-side encryption in S3.
ENCRYPTIONS = ("", "AES256", "aws:kms")


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    url: Secret = option(decides=False, names=("--store",), metavar="ADDRESS", help="s3://BUCKET/PREFIX or a folder")
    s3_profile: str = option(
        "default", decides=False, metavar="NAME",
        help="AWS profile that signs requests; default: whatever boto3 finds; empty: unsigned",
    )  # fmt: skip
    s3_endpoint: Secret = option(
        Secret(""), decides=False, metavar="ADDRESS", help="another server that speaks S3; left out: AWS"
    )
    connections: int = option(
        8, decides=False, unit="transfers", least=1, most=64, help="files, or parts of a large file, moved at a time"
    )
    encryption: str = option("", decides=False, choices=ENCRYPTIONS, help="server-side encryption in S3")
    kms_key: str = option("", decides=False, metavar="KEY", help="key of aws:kms; left out: the account's own")
    lease_s: float = option(
        60.0, decides=False, unit="s", least=2, most=3600,
        help="a machine that is silent for this long loses its turn to make a stage",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.kms_key and self.encryption != "aws:kms":
            raise UserError(f"kms_key = {self.kms_key} needs encryption = aws:kms; set that, or leave it empty")
        _ = self.place
        if not self.is_s3 and self.encryption:
            raise UserError(f"encryption = {self.encryption} is for a store in S3; leave it empty")

    @property
    def is_s3(self) -> bool:
        return self.url.reveal().startswith("s3://")

    @property
    def place(self) -> str:
        """The store's address in a normalized form, without secrets. Raises `UserError`."""
        try:
            scheme, path = url_scheme(self.url), local_path(self.url)
        except UserError as error:
            raise UserError(f"url = {error}") from None
        if self.is_s3:
            bucket = self.url.reveal().removeprefix("s3://").partition("/")[0]
            if not bucket or "@" in bucket:
                raise UserError(f"url = {self.url} is not a place in S3; write s3://bucket/prefix")
            return str(self.url).rstrip("/")
        if scheme not in ("", "file"):
            raise UserError(f"url = {self.url}: {scheme}:// is unknown; allowed: s3://, file:// and plain paths")
        if path.exists() and not path.is_dir():
            raise UserError(f"url = {self.url} is a file; give a folder, or s3://bucket/prefix")
        return str(path)
