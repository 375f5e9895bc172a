"""Luigi's log without the traceback of what is no mistake of the program."""

from __future__ import annotations

import logging

from trainer.errors import UserError


class OneLine(logging.Filter):
    """Makes one line of luigi's traceback when what failed is a `UserError`."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, UserError):
            record.msg, record.args, record.exc_info, record.exc_text = str(error), (), None, None
        return True
