"""What works around luigi's behaviour as it parses the command line and runs tasks. Each module names the luigi
functions concerned.

How luigi reads settings is worked around in `pipeline/settings`, which lies below this package and cannot import it.
`tests/test_taste.py` lists every file that uses a private name of luigi.
"""

from __future__ import annotations

from pipeline.luigi_adapters import command_line, log_filter, mail, workers


def install() -> None:
    """Install all adapters in this process, before luigi builds its first task."""
    command_line.install()
    log_filter.install()
    mail.install()
    workers.install()
