"""Luigi's log without the traceback of what is no mistake of the program."""

from __future__ import annotations

import logging
import sys

from common.errors import UserError


class OneLine(logging.Filter):
    """Makes one line of luigi's traceback, beside a message or in it, when what failed is a `UserError`."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = (record.exc_info or sys.exc_info())[1]
        if isinstance(error, UserError) and (record.exc_info or "Traceback" in record.getMessage()):
            record.msg, record.args, record.exc_info, record.exc_text = str(error), (), None, None
            record.levelno, record.levelname = logging.ERROR, "ERROR"
        return True
