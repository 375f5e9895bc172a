"""The whole chain on XLA, through the real luigi."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.chain import Chain
from tests.helpers.support import metrics

pytest.importorskip("torch_xla")


def test_both_phases_train_on_xla_and_compile_only_what_precompile_listed(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    done = chain.run("BertPhase2", "--Cluster-device", "xla")
    assert "warning: graph" not in done.stderr
    assert "model: " in done.stderr
    for phase in (1, 2):
        assert chain.manifest(f"precompile-phase{phase}")["counts"] == {"graphs": 2}
        assert metrics(chain.latest(f"pretrain-phase{phase}"))[-1]["compiled_graphs"] == 2
