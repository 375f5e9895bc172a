"""Luigi's mails without secrets, and without consequences for the run.

`luigi.notifications.send_email` lets exceptions of the mail server through, and luigi then ends with a traceback; the
mails of `luigi.notifications.send_error_email` quote the command line and the traceback of the task.
"""

from __future__ import annotations

import warnings
from typing import Any

from luigi import notifications

from common.console import log
from common.errors import one_line
from common.secrets import redact


def install() -> None:
    """For the rest of this process."""
    send: Any = notifications.send_email

    def send_email(subject: str, message: str, *rest: Any, **options: Any) -> None:
        try:
            with warnings.catch_warnings():
                # Six lines about luigi's own settings of mail servers, whose defaults it does not allow.
                warnings.filterwarnings("ignore", message='Parameter ".*" with value "None" is not of type string')
                send(redact(subject), redact(message), *rest, **options)
        except Exception as error:  # smtplib, sockets, boto3, sendgrid and settings have no common base
            log(f"note: the mail was not sent: {type(error).__name__}: {one_line(error)}; see [email] and [smtp]")

    notifications.send_email = send_email
