"""Secrets: no form of signed address, password or token gets through, and a renewed one names the same object."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import logging
import pickle
import time
from collections.abc import Callable
from unittest import mock

import boto3
import pytest
from botocore.config import Config
from botocore.signers import CloudFrontSigner

from common.errors import UserError, one_line
from common.secrets import (
    SECRETS_VARIABLE,
    RedactingFilter,
    Secret,
    address_identity,
    hidden_words,
    redact,
    revealed_by_parent,
)

CANARY = "CaNaRy0123456789"


def presigned(version: str) -> Callable[[str, int], str]:
    """Addresses that boto3 itself presigns for `key` at a given time."""

    def sign(key: str, at: int) -> str:
        client = boto3.client(
            "s3", region_name="us-east-1", aws_access_key_id=f"AKIA{CANARY}", aws_secret_access_key="s",
            aws_session_token=CANARY, config=Config(signature_version=version),
        )  # fmt: skip
        moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
        clock = mock.patch("botocore.auth.get_current_datetime", return_value=moment)
        with clock, mock.patch("time.time", return_value=at):
            url: str = client.generate_presigned_url("get_object", Params={"Bucket": "data", "Key": key})
        return url

    return sign


def cloudfront(key: str, at: int) -> str:
    signer = CloudFrontSigner(CANARY, lambda message: hashlib.sha512(message).digest())
    until = datetime.datetime.fromtimestamp(at, datetime.UTC)
    url: str = signer.generate_presigned_url(f"https://d111.cloudfront.net/{key}", date_less_than=until)
    return url


def _digest(key: str, at: int) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(f"{CANARY}{key}{at}".encode()).digest()).decode()


def by_hand(form: str) -> Callable[[str, int], str]:
    """Addresses made by hand, in the form that the services' documentation shows."""
    day = datetime.datetime.fromtimestamp

    def sign(key: str, at: int) -> str:
        moment = day(at, datetime.UTC)
        return form.format(
            key=key, at=at, day=f"{moment:%Y-%m-%d}", basic=f"{moment:%Y%m%dT%H%M%SZ}", sig=_digest(key, at),
            canary=CANARY + str(at),
        )  # fmt: skip

    return sign


FORMS: dict[str, Callable[[str, int], str]] = {
    "AWS V4": presigned("s3v4"),
    "AWS V2": presigned("s3"),
    "CloudFront": cloudfront,
    "Google V4": by_hand(
        "https://storage.googleapis.com/data/{key}?X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Credential=me%40x.iam%2F"
        "{basic}&X-Goog-Date={basic}&X-Goog-Expires=900&X-Goog-SignedHeaders=host&X-Goog-Signature={sig}"
    ),
    "Google V2": by_hand(
        "https://storage.googleapis.com/data/{key}?GoogleAccessId=me@x.iam&Expires={at}&Signature={sig}"
    ),
    "Azure SAS": by_hand(
        "https://me.blob.core.windows.net/data/{key}?sp=r&st={day}T00:00:00Z&se={day}T08:00:00Z&spr=https&sv=2022-11-02"
        "&sr=b&sig={sig}"
    ),
    "Alibaba": by_hand("https://data.oss.example.com/{key}?OSSAccessKeyId={canary}&Expires={at}&Signature={sig}"),
    "Tencent": by_hand(
        "https://data.cos.example.com/{key}?q-sign-algorithm=sha1&q-ak={canary}&q-sign-time={at};{at}&q-key-time={at}"
        "&q-header-list=host&q-url-param-list=&q-signature={sig}"
    ),
    "Akamai": by_hand("https://cdn.example.com/{key}?hdnts=exp={at}~hmac={sig}"),
    "token": by_hand("https://example.com/{key}?token={canary}"),
    "access_token": by_hand("https://example.com/{key}?access_token={canary}&expires_in=1"),
    "api-key": by_hand("https://example.com/{key}?x-api-key={canary}"),
    "key of a name of its own": by_hand("https://{canary}:x@example.com/{key}"),
    "password": by_hand("https://me:{canary}@example.com/{key}"),
    "p@ss": by_hand("https://me:p@{canary}@example.com/{key}"),
    "p/ss": by_hand("https://me:p/{canary}#@example.com/{key}"),
    "fragment": by_hand("https://example.com/{key}#{canary}"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_renewed_signature_names_the_same_object_and_another_key_another(form: str) -> None:
    sign = FORMS[form]
    first, renewed, other = sign("a.tar", 1_800_000_000), sign("a.tar", 1_800_777_777), sign("b.tar", 1_800_000_000)
    assert first != renewed or form == "fragment"
    assert address_identity(first) == address_identity(renewed)
    assert address_identity(first) != address_identity(other)
    for shown in (address_identity(first), str(Secret.address(first)), redact(f"failed: {first}, again")):
        assert CANARY.lower() not in shown.lower()
        assert _digest("a.tar", 1_800_000_000)[:12] not in shown
    assert Secret.address(first).reveal() == first


def test_what_names_an_object_stays_apart() -> None:
    """Even next to a signature, and by parameters that are unknown here, whose values are never shown."""
    objects = [
        *("https://h/x?id=5", "https://h/x?id=6", "https://h/x?versionId=abc&sig=1", "https://h/x?versionId=abd&sig=2"),
        *(f"https://h/x?key={CANARY}", "https://h/x?key=b", "https://h/x?code=1", "https://h/x?code=2", "https://h/x"),
        *("s3://data/a?x", "s3://data/a?y", "s3://data/a#1", "s3://data/a#2", "https://h:8080/x", "https://h/@me/x"),
    ]
    assert len({address_identity(url) for url in objects}) == len(objects)
    assert CANARY not in address_identity(f"https://h/x?key={CANARY}")
    assert str(Secret.address(f"https://h/x?key={CANARY}")) == "https://h/x?key=***"
    for url in objects:
        assert address_identity(address_identity(url)) == address_identity(url)
    for plain in ("/data/what?.tar", "file:///a?b#c", "texts/*.txt", "http://[::1]:80/x@y", "https://h/x?id=5"):
        assert str(Secret.address(plain)) == address_identity(plain) == plain


def test_a_secret_shows_itself_nowhere() -> None:
    secret, address = Secret(CANARY), Secret.address(f"https://me:{CANARY}@h/x")
    for shown in (str, repr, "{}".format, "%s".__mod__, json.dumps, "".join, lambda s: json.dumps({"a": [s]})):
        assert CANARY not in shown(secret)  # type: ignore[operator]
        assert CANARY not in shown(address)  # type: ignore[operator]
    assert (f"{secret}", f"{address}", secret.reveal()) == ("***", "https://h/x", CANARY)
    assert secret != Secret(f"{CANARY}-2")
    assert not Secret("")
    assert pickle.loads(pickle.dumps(secret)).reveal() == CANARY


def test_text_of_other_libraries_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secrets of addresses in it, none that were met before, wherever they stand, none from the environment."""
    password = Secret.address("https://me:b%40r-s3cret@h/x")
    assert password
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("HTTPS_PROXY", "me:pr0xyCaNaRy@proxy:3128")
    for text in (
        f"HTTPSConnectionPool(host='h', port=443): Max retries exceeded with url: /x?sp=r&sig={CANARY}xx (Caused by …)",
        f'Could not connect to the endpoint URL: "https://me:{CANARY}y@h/bucket"',
        "Cannot connect to proxy pr0xyCaNaRy",
        f"the key {CANARY} is not known",
        "password b@r-s3cret, or b%40r-s3cret, is wrong",
    ):
        for shown in (redact(text), str(UserError(text)), one_line(ValueError(text))):
            assert not any(word in shown for word in (CANARY, "s3cret", "pr0xy")), shown
    plain = "what?.tar of 3 = 2 + 1; see https://example.com/a/b (2026-11-22)."
    assert redact(plain) == plain


def test_log_records_have_none_in_their_tracebacks_either(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test-secrets")
    logger.addFilter(RedactingFilter())
    try:
        raise RuntimeError(f"https://me:{CANARY}@h")
    except RuntimeError:
        logger.exception("failed at %s", f"https://h/?token={CANARY}")
    assert "RuntimeError: https://h" in caplog.text
    assert CANARY not in caplog.text


def test_a_child_is_told_beside_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    url, plain = Secret.address(f"https://me:{CANARY}@h/x"), Secret.address("/data/x.tar")
    environment = hidden_words(["--url", url, plain, "word"])
    monkeypatch.setenv(SECRETS_VARIABLE, environment[SECRETS_VARIABLE])
    assert revealed_by_parent(str(url)).reveal() == url.reveal()
    assert revealed_by_parent("/data/x.tar").reveal() == "/data/x.tar"
    assert hidden_words([plain, "word"]) == {}


def test_redacting_a_line_costs_microseconds() -> None:
    """Every line of a stage's output is redacted."""
    line = "step 120 of 500: loss 3.214, 12.3 steps/s " * 3
    began = time.process_time()
    for _ in range(1000):
        redact(line)
    assert time.process_time() - began < 1  # 40 µs a line, with room for a slower machine
