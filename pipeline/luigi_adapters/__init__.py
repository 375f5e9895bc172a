"""The only code that works around luigi's behaviour. Each module names the luigi functions concerned."""

from __future__ import annotations

from pipeline.luigi_adapters import command_line, log_filter, mail, workers


def install() -> None:
    """Install all adapters in this process, before luigi builds its first task."""
    command_line.install()
    log_filter.install()
    mail.install()
    workers.install()
