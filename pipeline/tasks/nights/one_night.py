"""`python -m pipeline.tasks.nights.one_night`: the chain of one night, in a child process that dies with its parent.

Settings are global to a process (here those of LUIGI_CONFIG_PATH), but RangeDaily runs many nights in one process.
"""

from __future__ import annotations

from luigi.cmdline import luigi_run

from common.process import die_with_starter

if __name__ == "__main__":
    die_with_starter()
    luigi_run(["--module", "pipeline", "BertPhase2"])
