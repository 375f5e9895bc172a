"""A short run of the random killer; `python -m tests.helpers.killer` is the long one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.chain import Chain
from tests.helpers.killer import check_end, digest, torment


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, 2])
def test_random_kills_change_nothing(tmp_path: Path, workers: int) -> None:
    chain = Chain(tmp_path)
    words = ["--Cluster-nproc-per-node", str(workers)]
    chain.run("BertPhase2", *words)
    wanted = digest(chain)
    shutil.rmtree(chain.work)
    assert torment(chain, random.Random(workers), words, longest_s=5.0, most=8) > 0
    assert digest(chain) == wanted
    check_end(chain)
