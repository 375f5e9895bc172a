"""Keep passwords, tokens and signatures out of everything that is written or shown.

`Secret` holds one; `redact` removes them from text; `address_identity` is an address without its credentials, which a
renewed signature does not change. Imports neither torch nor luigi.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, quote_plus, unquote

MASK = "***"
#: Environment variable of a child process, a JSON object: its redacted arguments → the secrets they stand for.
SECRETS_VARIABLE = "STAGE_SECRETS"

#: Names of query parameters, in lower case without - and _, that hold a secret in any address.
_SECRET_NAME = re.compile(
    r".*(token|secret|secretkey|password|passwd|passphrase|signature|apikey|accesskey|authkey|credentials?|jwt|hmac)"
    r"|sig|sign|pwd|pass|auth|authorization|bearer|hdnts|hdnea|hdntl"
)
#: Parameters that belong to a signature: AWS V4, Google V4, Alibaba, Huawei, Tencent.
_SIGNATURE_NAME = re.compile(r"x-(amz|goog|oss|obs|cos)-.*|q-(sign|ak|key-time|header-list|url-param-list).*")
#: Parameters that belong to a signature only beside one: AWS V2, Google V2, CloudFront, Google's CDN, Alibaba.
_WITH_SECRET_NAME = re.compile(
    r"expires?|exp|expiry|expiration|ttl|policy|key-pair-id|hash-algorithm|keyname|urlprefix|x-id"
    r"|(aws|oss)?accesskeyid|googleaccessid"
)
#: Parameters of Azure's shared access signatures, beside `sig`.
_WITH_SIG_NAME = re.compile(r"s[vsrtpei]|srt|spr|sip|sdd|ses|sk(oid|tid|t|e|s|v)|saoid|suoid|scid")
#: Parameters that name an object and are shown; the value of any other is masked.
_PLAIN_NAME = re.compile(
    r"id|file|filename|path|name|part|partnumber|version|versionid|generation|snapshot|rev|revision|ref|branch|tag"
    r"|format|download|raw|dl|alt|export|lang|page|offset|limit|split|subset|config|phase|date|year|month|day|dataset"
)
_HASHED = re.compile("sha256:[0-9a-f]{16}")
_PLAIN_VALUE = re.compile(r"[\w.,:+/@{}* -]{0,200}")
#: Environment variables whose values are secrets; those that only say where a file is are not.
_SECRET_VARIABLE = re.compile(
    r"(?i).*(secret|token|password|passwd|passphrase|credentials?|api_?key|access_?key|private_?key|webhook)(?!.*_id$)"
)
_NO_SECRET_VARIABLE = re.compile(r"(?i).*(_file|_path|_dir|_uri|_id|_name)|failpoint_.*|" + SECRETS_VARIABLE)
#: Minimum lengths of secrets that are masked in any text. Shorter ones would also match parts of ordinary words.
_LITERAL_MIN, _VARIABLE_MIN = 6, 8

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>\x00-\x1f]+")
_QUERY = re.compile(r"(?<=\?)[^\s\"'<>?]*=[^\s\"'<>]*")
#: Punctuation that may follow an address in a sentence.
_PUNCTUATION = re.compile(r"[.,;:!)\]}]*$")

#: Secrets that this process has seen → what is shown instead.
_met: dict[str, str] = {}


class Secret(str):
    """A secret, or an address that may hold one. Its string value is redacted; `reveal` returns the original.

    So formatting, JSON, logs and command lines are redacted by default.
    """

    __slots__ = ("_whole",)
    _whole: str

    def __new__(cls, whole: str) -> Secret:
        """A text that is secret as a whole; an empty one is not a secret."""
        return cls._made(whole, MASK if whole else "")

    @classmethod
    def address(cls, whole: str) -> Secret:
        """An address or path, shown without its login, its signature and the values of unknown parameters."""
        made = cls._made(whole, public_address(whole))
        _met.update((word, MASK) for word in _credentials_of(whole) if len(word) >= _LITERAL_MIN)
        return made

    @classmethod
    def _made(cls, whole: str, shown: str) -> Secret:
        self = str.__new__(cls, shown)
        self._whole = whole
        if len(whole) >= _LITERAL_MIN and whole != shown:
            _met[whole] = shown
        return self

    def reveal(self) -> str:
        return self._whole

    @property
    def hides(self) -> bool:
        """Whether the original differs from what is shown."""
        return self._whole != str(self)

    def __eq__(self, other: object) -> bool:
        return self._whole == other._whole if isinstance(other, Secret) else str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret._made, (self._whole, str(self))


def revealed_by_parent(argument: str) -> Secret:
    """The address for which a command-line argument stands: the parent process's original if it was redacted."""
    hidden: Mapping[str, str] = json.loads(os.environ.get(SECRETS_VARIABLE, "{}"))
    return Secret.address(hidden.get(argument, argument))


def hidden_words(words: Sequence[str]) -> dict[str, str]:
    """The environment variables that a child's `revealed_by_parent` needs for the arguments `words`, if any."""
    hidden: dict[str, str] = {}
    for word in words:
        if isinstance(word, Secret) and word.hides:
            assert hidden.get(str(word), word.reveal()) == word.reveal(), f"two secrets are shown as {word}"
            hidden[str(word)] = word.reveal()
    return {SECRETS_VARIABLE: json.dumps(hidden)} if hidden else {}


def is_secret_name(name: str) -> bool:
    """Whether an option, setting or query parameter of this name holds a secret (`smtp-password`, `access_token`)."""
    return _SECRET_NAME.fullmatch(re.sub("[-_]", "", name.lower())) is not None


def redact(text: str) -> str:
    """`text` without secrets: those of any address in it (login, signature, tokens), those that this process has seen,
    and those in its environment."""
    for word, shown in sorted({**_of_environment(), **_met}.items(), key=lambda item: -len(item[0])):
        if word in text:
            text = text.replace(word, shown)
    if "://" in text:
        text = _ADDRESS.sub(_public_match, text)
    if "?" in text:
        text = _QUERY.sub(lambda found: _bare_query(found[0]), text)
    return text


def _bare_query(query: str) -> str:
    """Redact the query of an address without a host, as in urllib3's errors, or any text with ? and =."""
    is_signed = any(is_secret for *_, is_secret in _parameters(query))
    return _public_query(query, masks_unknown=False) if is_signed else query


def _public_match(found: re.Match[str]) -> str:
    end = _PUNCTUATION.search(found[0])
    assert end is not None
    return public_address(found[0][: end.start()]) + end[0]


def public_address(address: str) -> str:
    """The address without secrets; a path stays unchanged."""
    return _without_secrets(address, _shown_value)


def address_identity(address: str) -> str:
    """An identity for the object behind the address: a renewed signature does not change it.

    The values of unknown parameters are hashed.
    """
    return _without_secrets(address, _hashed_value)


def _shown_value(value: str) -> str:
    return MASK


def _hashed_value(value: str) -> str:
    if _HASHED.fullmatch(value):  # the identity of an identity is itself
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:16]}"


def _without_secrets(address: str, unknown: Callable[[str], str]) -> str:
    scheme, mark, rest = address.partition("://")
    if not mark or scheme.lower() == "file":
        return address
    rest = _without_login(rest)
    if scheme.lower() == "s3":  # a key may hold any character
        head, question, query = rest.partition("?")
        is_signed = any(is_secret for *_, is_secret in _parameters(query))
        return f"{scheme}://{head}{question}{_public_query(query, unknown=unknown) if is_signed else query}"
    head, _, query = rest.partition("#")[0].partition("?")
    shown = _public_query(query, unknown=unknown)
    return f"{scheme}://{head}{'?' if shown else ''}{shown}"


def _without_login(rest: str) -> str:
    """The part after `://` without user and password, which may contain any character, @ and / included."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        return rest[authority.rindex("@") + 1 :]
    # A colon that no port follows belongs to a login whose password holds one of / ? #.
    if ":" in authority and "@" in rest and not re.search(r"(:\d*|\])$", authority):
        return rest[rest.rindex("@") + 1 :]
    return rest


def _public_query(query: str, *, unknown: Callable[[str], str] = _shown_value, masks_unknown: bool = True) -> str:
    """A query without its signature and without the values of unknown parameters."""
    kept = []
    for name, value, is_secret in _parameters(query):
        if is_secret:
            continue
        is_plain = _PLAIN_NAME.fullmatch(name.lower()) and _PLAIN_VALUE.fullmatch(value)
        shown = quote_plus(value) if is_plain or not masks_unknown else value if value == MASK else unknown(value)
        kept.append(f"{quote_plus(name)}={shown}")
    return "&".join(kept)


def _parameters(query: str) -> list[tuple[str, str, bool]]:
    """(name, value, whether it is part of the credentials) for each parameter of a query."""
    pairs = parse_qsl(query, keep_blank_values=True)
    names = {name.lower() for name, _ in pairs}
    is_signed = any(map(is_secret_name, names)) or any(map(_SIGNATURE_NAME.fullmatch, names))

    def belongs(name: str) -> bool:
        return bool(
            is_secret_name(name)
            or _SIGNATURE_NAME.fullmatch(name)
            or (is_signed and _WITH_SECRET_NAME.fullmatch(name))
            or ("sig" in names and _WITH_SIG_NAME.fullmatch(name))
        )

    return [(name, value, belongs(name.lower())) for name, value in pairs]


def _credentials_of(address: str) -> Iterator[str]:
    """The password of an address and the values of its secret parameters, each as written and decoded."""
    rest = address.partition("://")[2]
    if not rest:
        return
    bare = _without_login(rest)
    if len(bare) < len(rest):
        password = rest[: len(rest) - len(bare) - 1].partition(":")[2]
        yield from (password, unquote(password))
    for pair in rest.partition("?")[2].partition("#")[0].split("&"):
        name, _, value = pair.partition("=")
        if is_secret_name(unquote(name)):
            yield from (value, unquote(value))


def _of_environment() -> dict[str, str]:
    return _secrets_among(tuple(os.environ.items()))


@functools.lru_cache(maxsize=4)
def _secrets_among(variables: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The secrets among environment variables, logins of proxies included."""
    found: dict[str, str] = {}
    for name, value in variables:
        if name.lower().endswith("_proxy"):
            found |= {word: MASK for word in _credentials_of(value if "://" in value else f"http://{value}")}
        elif _SECRET_VARIABLE.fullmatch(name) and not _NO_SECRET_VARIABLE.fullmatch(name):
            found[value] = public_address(value) if "://" in value else MASK
    return {word: shown for word, shown in found.items() if len(word) >= _VARIABLE_MIN}


class RedactingFilter(logging.Filter):
    """Redacts log records, their tracebacks included."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        return True


def redact_tracebacks() -> None:
    """From now on redact the tracebacks that Python prints for uncaught exceptions."""

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        print(redact("".join(traceback.format_exception(kind, error, where))), end="", file=sys.stderr)

    sys.excepthook = hook
    threading.excepthook = lambda args: hook(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
