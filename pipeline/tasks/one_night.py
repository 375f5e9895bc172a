"""`python -m pipeline.tasks.one_night`: the chain of one night, as a process that dies with the one that started it.

A process has the settings of one run, here those of LUIGI_CONFIG_PATH, but RangeDaily runs many nights in a process.
"""

from __future__ import annotations

from luigi.cmdline import luigi_run

from common.process import die_with_starter

if __name__ == "__main__":
    die_with_starter()
    luigi_run(["--module", "pipeline", "BertPhase2"])
