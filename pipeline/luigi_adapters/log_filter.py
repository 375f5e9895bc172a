"""Luigi's log without secrets, and without tracebacks for user errors.

`luigi.worker.TaskProcess._handle_run_exception`, `Worker._log_dependency_error` and others log every exception with its
traceback, and `luigi.interface` logs settings and command lines as they were given.
"""

from __future__ import annotations

import configparser
import contextlib
import logging
import sys
from collections.abc import Iterator

from luigi.configuration import get_config

from common.errors import UserError
from common.secrets import RedactingFilter, Secret, is_secret_name, redact_tracebacks


class OneLine(logging.Filter):
    """Reduces luigi's traceback of a `UserError`, attached to a message or in it, to the error's line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = (record.exc_info or sys.exc_info())[1]
        if isinstance(error, UserError) and (record.exc_info or "Traceback" in record.getMessage()):
            record.msg, record.args, record.exc_info, record.exc_text = str(error), (), None, None
            record.levelno, record.levelname = logging.ERROR, "ERROR"
        return True


def install() -> None:
    """For the rest of this process."""
    for value in _secrets_given_to_luigi():
        Secret(value)
    logging.getLogger("luigi-interface").addFilter(OneLine())
    for name in ("luigi", "luigi-interface", "luigi.scheduler"):
        logging.getLogger(name).addFilter(RedactingFilter())
    redact_tracebacks()


def _secrets_given_to_luigi() -> Iterator[str]:
    """[smtp] password and the like, from luigi's files and its command line, which its mails quote."""
    config = get_config()
    for section in config.sections():
        for key in config.options(section):
            if is_secret_name(key):
                # Whoever needs a value refuses it if it cannot be interpolated.
                with contextlib.suppress(configparser.InterpolationError):
                    yield config.get(section, key)
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--") and is_secret_name(name):
            yield value if equals else following
