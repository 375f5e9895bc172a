"""Tells people how a night ended: by mail, through luigi's own [email] and [smtp], and by a webhook."""

from __future__ import annotations

import socket
import time
from typing import Any
from urllib.parse import urlsplit

from luigi import notifications

#: Seconds for one answer, and before each further try.
_ANSWER_S, _RETRY_S = 10.0, (1.0, 4.0)


def by_mail(subject: str, text: str) -> None:
    """A mail to [email] receiver, if there is one. Luigi sends none from a terminal unless [email] force_send."""
    email = notifications.email()
    if email.receiver:
        notifications.send_email(subject, text, email.sender, [email.receiver])


def by_webhook(url: str, **facts: Any) -> str | None:
    """POST the facts, and this host's name, as a JSON object. Returns what went wrong, in a line; None: it has
    arrived. What is answered with an error of the server, or not at all, is sent again, three times at most."""
    import requests

    where = urlsplit(url).hostname  # the rest of the address may be a secret
    problem = ""
    for wait_s in (*_RETRY_S, None):
        try:
            body = {**facts, "host": socket.gethostname()}
            # A redirect would become a GET without the facts, and may lead anywhere.
            status = requests.post(url, json=body, timeout=_ANSWER_S, allow_redirects=False).status_code
            if status < 300:
                return None
            problem = f"it answered with status {status}"
            if status < 500:
                break
        except requests.RequestException as error:
            problem = type(error).__name__
        if wait_s is not None:
            time.sleep(wait_s)
    return f"the webhook at {where} was not told of it: {problem}"
