"""What all stage commands share: exit statuses and error messages."""

from __future__ import annotations

import sys
from collections.abc import Callable

from common.errors import EXIT_INTERRUPTED, UserError
from common.process import die_with_starter, print_in_any_locale
from common.secrets import redact_tracebacks
from stages.directory.manifest import AlreadyComplete


def run(main: Callable[[], None]) -> None:
    """Run a command's `main`. Exit status: 0 complete, 1 with one line on a `UserError`, 75 on Ctrl-C."""
    die_with_starter()
    print_in_any_locale()
    redact_tracebacks()
    try:
        main()
    except AlreadyComplete:
        print("complete already; nothing to do", file=sys.stderr)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
