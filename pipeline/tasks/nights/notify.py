"""Notifications about a night: mail through luigi's [email] and [smtp], and a webhook."""

from __future__ import annotations

import datetime
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from luigi import notifications

from common.console import log
from common.secrets import redact
from pipeline.settings.sections import Settings

#: Request timeout and retry delays, in seconds.
_ANSWER_S, _RETRY_S = 10.0, (1.0, 4.0)


def by_all(settings: Settings, subject: str, line: str, *, event: str, status: str, date: datetime.date) -> None:
    """Send mail and call the webhook, if configured. Failures are only logged."""
    by_mail(subject, f"{line}\n")
    by_webhook_of(settings, event=event, status=status, date=date, line=line)


def by_webhook_of(settings: Settings, *, event: str, status: str, date: datetime.date, line: str) -> None:
    """Call [nights] webhook, if configured."""
    url = settings.nights.webhook
    if url:
        problem = by_webhook(
            url.reveal(), event=event, task="Nightly", date=str(date), status=status, line=redact(line),
            work_dir=str(settings.work_dir.absolute() / "nights" / str(date)),
        )  # fmt: skip
        if problem is not None:
            log(f"note: {problem}")


def by_mail(subject: str, text: str) -> None:
    """Mail [email] receiver, if configured. From a terminal luigi sends mail only with [email] force_send."""
    email = notifications.email()
    if email.receiver:
        notifications.send_email(subject, text, email.sender, [email.receiver])


def by_webhook(url: str, **facts: Any) -> str | None:
    """POST the facts and this host's name as a JSON object; returns the error as one line, or None.

    Server errors and timeouts are retried, with at most three requests.
    """
    import requests

    where = urlsplit(url).hostname  # the rest of the URL may be a secret
    problem = ""
    for wait_s in (*_RETRY_S, None):
        try:
            body = {**facts, "host": socket.gethostname()}
            # Following a redirect would send a GET without the facts, to any host.
            status = requests.post(url, json=body, timeout=_ANSWER_S, allow_redirects=False).status_code
            if status < 300:
                return None
            problem = f"it answered with status {status}"
            if status < 500:
                break
        except requests.exceptions.InvalidURL as error:
            problem = type(error).__name__
            break
        except (requests.RequestException, ValueError) as error:  # UnicodeError: an invalid host name
            problem = type(error).__name__
        if wait_s is not None:
            time.sleep(wait_s)
    return f"the webhook at {where} was not notified: {problem}"
