"""Background work gives way to training on the processor, even where Linux first shares time between sessions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.support import ROOT

AUTOGROUP = Path("/proc/self/autogroup")


def test_who_gives_way_is_nice_as_a_process_and_as_a_session() -> None:
    program = "import os; from common.process import give_way; give_way(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    said = f"; print(open('{AUTOGROUP}').read())" if AUTOGROUP.exists() else ""
    done = subprocess.run(
        [sys.executable, "-c", program + said], cwd=ROOT, capture_output=True, text=True, check=True,
        start_new_session=True,
    )  # fmt: skip
    niceness, *session = done.stdout.split()
    assert int(niceness) >= 15
    if not session:
        pytest.skip("this system has no autogroups")
    assert session[-1] == "15"
