"""What luigi itself writes, without secrets: its log, its mails (which quote the command line), uncaught exceptions."""

from __future__ import annotations

import configparser
import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from luigi import notifications
from luigi.configuration import get_config

from common.secrets import RedactingFilter, Secret, is_secret_name, redact, redact_tracebacks


def install() -> None:
    """For the rest of this process."""
    for value in _given():
        Secret(value)
    for name in ("luigi", "luigi-interface", "luigi.scheduler"):
        logging.getLogger(name).addFilter(RedactingFilter())
    redact_tracebacks()
    send = notifications.send_email

    def send_email(subject: str, message: str, *rest: Any, **options: Any) -> None:
        send(redact(subject), redact(message), *rest, **options)  # type: ignore[no-untyped-call]

    notifications.send_email = send_email


def _given() -> Iterator[str]:
    """Luigi's own secrets, [smtp] password and the like: of its files, and of its command line, which it mails."""
    config = get_config()
    for section in config.sections():
        for key in config.options(section):
            if is_secret_name(key):
                # What cannot be read as it is written is refused by whoever needs it.
                with contextlib.suppress(configparser.InterpolationError):
                    yield config.get(section, key)
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--") and is_secret_name(name):
            yield value if equals else following
