"""`python -m pipeline.tasks.one_night`: the chain of one night, as a process that dies with the one that started it.

Its settings are those of the file that LUIGI_CONFIG_PATH names. A process of its own, since the settings of a process
are those of one run, and RangeDaily has many nights in one.
"""

from __future__ import annotations

from luigi.cmdline import luigi_run

from common.process import die_with_starter

if __name__ == "__main__":
    die_with_starter()
    luigi_run(["--module", "pipeline", "BertPhase2"])
