"""A phase with a budget, through luigi: measured once and then fixed; the views show what is known of it so far."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chain import prepared_chain, wait_until
from tests.helpers.support import assert_same_bytes, losses
from trainer.metrics.budget import BUDGET

PHASE1 = ("Pretrain", "--phase", "1")
#: Of 6 steps, 3 are stable.
WSD = ("--Phase1-schedule", "wsd", "--Phase1-decay-share", "0.5")
BUDGETED = ("--Phase1-budget", "10m", *WSD)
SECTION = "[phase1]\nbudget = 10m\nschedule = wsd\ndecay_share = 0.5"
FINISH = (*PHASE1, "--Phase1-max-steps", "8", "--Phase1-schedule", "wsd", "--Phase1-decay-share", "0.25")


@pytest.mark.slow
def test_a_budget_is_measured_once_and_its_steps_are_trained(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Luigi is killed once the step count is recorded; the test sets it to 6, as if measured on a slower machine."""
    chain, other = (prepared_chain(tmp_path_factory).copy(tmp_path / name) for name in ("chain", "other"))
    other.run(*PHASE1, *WSD, "--Phase1-max-steps", "6")
    given = other.latest("pretrain-phase1")

    def row(*words: str) -> dict[str, Any]:
        return chain.status(*(words or BUDGETED))["pretrain-phase1"]

    def why(status: int) -> str:
        return chain.ask("why", *PHASE1, status=status, LUIGI_CONFIG_PATH=str(budgeted)).stdout

    budgeted = chain.directory / "budgeted.cfg"
    budgeted.write_text(chain.config.read_text().replace("[phase1]", SECTION))
    assert (row()["state"], row()["total"]) == ("waiting", None)
    luigi = chain.start(*PHASE1, *BUDGETED, FAILPOINT=f"rename-after:{BUDGET}", FAILPOINT_ACTION="wait 600")
    try:
        wait_until(lambda: any(chain.work.glob(f"pretrain-phase1-*/{BUDGET}")))
        assert row()["state"] == "running"
    finally:
        chain.lose(luigi)
    (path,) = chain.work.glob(f"pretrain-phase1-*/{BUDGET}")
    wait_until(lambda: row()["state"] == "interrupted")
    assert row()["detail"] == "no checkpoint yet"
    assert "it was interrupted" in why(1)
    record = json.loads(path.read_text())
    assert record["1"]["max_steps"] >= 10
    record["1"]["max_steps"] = 6
    path.write_text(json.dumps(record))

    said = chain.run(*PHASE1, *BUDGETED)
    assert "budget 10m: 6 steps, as measured when the phase began" in said.stdout + said.stderr
    done = chain.latest("pretrain-phase1")
    assert done == path.parent
    assert len(losses(done)) == 6
    assert chain.manifest("pretrain-phase1")["counts"]["steps"] == 6  # type: ignore[index]
    assert "is complete" in why(0)
    # The same number of steps, given by hand, is the same training under another fingerprint.
    assert given.name != done.name
    assert_same_bytes(done / "checkpoints" / "ckpt_6", given / "checkpoints" / "ckpt_6")
    # Settings that the budget replaces do not count; a longer budget is another training.
    assert row(*BUDGETED, "--Phase1-max-steps", "7", "--Phase1-warmup-steps", "2")["state"] == "complete"
    longer = row("--Phase1-budget", "20m", *WSD)
    assert (longer["state"], longer["total"]) == ("stale", None)
    assert "would continue from" not in longer["detail"]
    # Its stable part can get another end, as that of a training with max_steps.
    finished = chain.run(*FINISH)
    assert f"continues from step 3 of {done.name}" in finished.stdout + finished.stderr
    shutil.rmtree(given)  # nothing to continue from
    other.run(*FINISH)
    assert_same_bytes(*(one.latest("pretrain-phase1") / "checkpoints" / "ckpt_8" for one in (chain, other)))
