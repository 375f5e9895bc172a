"""Which checkpoint a run continues from, through the real command: a named one is used or refused, those that training
leaves behind are set aside, and no whole one is ever lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from common.lock import LOCK
from tests.helpers.support import assert_one_line_error, assert_same_bytes, flip_a_byte, train
from trainer.checkpoint.directory import abandoned, why_invalid
from trainer.state import TrainState

COMMON = {
    "batch_size": 4, "grad_accum_usteps": 4, "lr": 3e-3, "warmup_steps": 2, "max_pred_len": 5, "device": "cpu",
    "precision": "fp32", "num_ckpts_to_keep": -1, "ckpt_interval_steps": 2, "max_steps": 8,
}  # fmt: skip


class Training:
    """The trainer's command on one data set and model."""

    def __init__(self, data: Path, model: Path) -> None:
        self._given = {**COMMON, "data_dir": data, "model_config": model}

    def try_it(
        self, out: Path, *, env: dict[str, str] | None = None, **values: object
    ) -> subprocess.CompletedProcess[str]:
        return train(env=env, output_dir=out, **{**self._given, **values})

    def run(self, out: Path, **values: object) -> str:
        done = self.try_it(out, **values)
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def training(data: Path, model: Path) -> Training:
    return Training(data, model)


@pytest.fixture(scope="module")
def six(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("six") / "out"
    training.run(out, steps_this_run=6)
    return out


@pytest.fixture(scope="module")
def straight(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 8 of an undisturbed run."""
    out = tmp_path_factory.mktemp("straight")
    training.run(out)
    return out / "checkpoints" / "ckpt_8"


@pytest.fixture
def out(six: Path, tmp_path: Path) -> Path:
    """A copy of `six`."""
    return Path(shutil.copytree(six, tmp_path / "out"))


def names(out: Path) -> dict[str, list[str]]:
    """The checkpoints by location; all are asserted to be whole, except for those in `abandoned-…`."""
    directory = out / "checkpoints"
    found = {"": sorted(path.name for path in directory.glob("ckpt_*"))}
    assert all(why_invalid(directory / name) is None for name in found[""])
    return found | {place.name: sorted(path.name for path in place.glob("ckpt_*")) for place in abandoned(directory)}


def test_a_damaged_newest_checkpoint_costs_no_whole_one(training: Training, out: Path, straight: Path) -> None:
    flip_a_byte(out / "checkpoints" / "ckpt_6" / "model-00-of-01.safetensors")
    said = training.run(out, resume_ckpt=True, num_ckpts_to_keep=1, ckpt_interval_steps=1, steps_this_run=5)
    assert "is damaged" in said
    assert names(out) == {"": ["ckpt_5"], "abandoned-1": ["ckpt_6"]}
    training.run(out, resume_ckpt=True, num_ckpts_to_keep=1)
    assert_same_bytes(out / "checkpoints" / "ckpt_8", straight)


def test_a_damaged_older_checkpoint_does_not_count_as_kept(training: Training, out: Path) -> None:
    flip_a_byte(out / "checkpoints" / "ckpt_4" / "model-00-of-01.safetensors")
    training.run(out, resume_ckpt=True, num_ckpts_to_keep=3, ckpt_interval_steps=0)
    directory = out / "checkpoints"
    whole = sorted(path.name for path in directory.glob("ckpt_*") if why_invalid(path) is None)
    assert whole == ["ckpt_2", "ckpt_6", "ckpt_8"]


def test_what_is_rolled_back_from_is_set_aside_and_the_new_branch_stays(
    training: Training, out: Path, straight: Path
) -> None:
    said = training.run(out, resume_ckpt=True, resume_step=2, num_ckpts_to_keep=2, steps_this_run=3)
    assert "set aside ckpt_6, ckpt_4" in said
    assert names(out) == {"": ["ckpt_2", "ckpt_3"], "abandoned-1": ["ckpt_4", "ckpt_6"]}
    aside = out / "checkpoints" / "abandoned-1"
    assert all(why_invalid(path) is None for path in aside.glob("ckpt_*"))
    assert [json.loads(line)["step"] for line in (aside / "metrics.jsonl").read_text().splitlines()] == [*range(1, 7)]
    assert "ckpt_3 at step 3" in training.run(out, resume_ckpt=True, num_ckpts_to_keep=2)
    assert names(out) == {"": ["ckpt_6", "ckpt_8"], "abandoned-1": ["ckpt_4", "ckpt_6"]}
    assert_same_bytes(out / "checkpoints" / "ckpt_8", straight)


@pytest.mark.parametrize("by", [{"resume_step": 4}, {"resume_ckpt_path": "ckpt_4"}])
def test_a_step_or_path_that_is_named_is_rolled_back_to_each_time(
    training: Training, out: Path, by: dict[str, object]
) -> None:
    """Even without --resume_ckpt."""
    if "resume_ckpt_path" in by:
        by = {"resume_ckpt_path": out / "checkpoints" / "ckpt_4"}
    stopping = {"FAILPOINT": "step:5.0", "FAILPOINT_ACTION": "terminate"}
    done = training.try_it(out, env=stopping, **by)
    assert done.returncode == 75, done.stdout
    assert f"without --{next(iter(by))} continues" in done.stdout
    assert names(out) == {"": ["ckpt_2", "ckpt_4", "ckpt_5"], "abandoned-1": ["ckpt_6"]}
    assert "ckpt_4 at step 4" in training.run(out, steps_this_run=4, **by)
    assert names(out) == {"": ["ckpt_2", "ckpt_4"], "abandoned-1": ["ckpt_6"], "abandoned-2": ["ckpt_5"]}


def test_a_named_step_that_cannot_be_used_is_refused_and_nothing_moves(training: Training, out: Path) -> None:
    before = names(out)
    assert_one_line_error(training.try_it(out, resume_step=5), "no checkpoint of step 5", "6, 4, 2")
    both = training.try_it(out, resume_step=2, resume_ckpt_path=out / "checkpoints" / "ckpt_4")
    assert_one_line_error(both, "--resume_ckpt_path", "--resume_step 2", "leave one of them out")
    other = training.try_it(out, resume_step=4, seed=1)
    assert_one_line_error(other, "seed")
    assert names(out) == before
    flip_a_byte(out / "checkpoints" / "ckpt_4" / "model-00-of-01.safetensors")
    assert_one_line_error(training.try_it(out, resume_step=4), "ckpt_4", "is damaged", "name another")
    assert not abandoned(out / "checkpoints")


def test_a_checkpoint_from_elsewhere_begins_a_directory_of_its_own(
    training: Training, six: Path, out: Path, straight: Path, tmp_path: Path
) -> None:
    """The same command continues from its own latest checkpoint; in a directory with another training it is refused."""
    given = six / "checkpoints" / "ckpt_4"
    branch = tmp_path / "branch"
    said = training.run(branch, resume_ckpt_path=given, steps_this_run=6)  # --resume_ckpt is implied
    assert f"resuming from checkpoint {given} at step 4" in said
    said = training.run(branch, resume_ckpt_path=given)
    assert "ckpt_6 at step 6" in said
    assert_same_bytes(branch / "checkpoints" / "ckpt_8", straight)
    for resume in (True, False):
        refused = training.try_it(out, resume_ckpt_path=given, resume_ckpt=resume)
        assert_one_line_error(refused, "ckpt_6", "did not begin with", "another --output_dir")
    assert names(out) == {"": ["ckpt_2", "ckpt_4", "ckpt_6"]}


def test_a_finished_training_changes_nothing_when_it_is_run_again(training: Training, out: Path) -> None:
    training.run(out, resume_ckpt=True)

    def contents() -> dict[str, bytes]:
        files = [path for path in out.rglob("*") if path.is_file() and path.name != LOCK]
        return {str(path): path.read_bytes() for path in files}

    before = contents()
    training.run(out, resume_ckpt=True)
    assert contents() == before


def phase2(given: Path | None = None) -> dict[str, object]:
    start = {} if given is None else {"resume_ckpt_path": given}
    return {"phase2": True, "resume_ckpt": True, "phase1_end_step": 6, "max_steps": 4, **start}


def test_phase_2_goes_on_from_its_own_and_refuses_other_weights(training: Training, six: Path, tmp_path: Path) -> None:
    given, two = six / "checkpoints" / "ckpt_6", tmp_path / "two"
    training.run(two, **phase2(given), steps_this_run=1)
    assert "ckpt_7 at step 7" in training.run(two, **phase2(given), steps_this_run=2)
    assert "weights of" in training.run(two, **phase2(given), resume_step=6, steps_this_run=1)
    assert names(two)["abandoned-1"] == ["ckpt_7", "ckpt_8"]
    training.run(tmp_path / "other", seed=3, max_steps=6)
    other = tmp_path / "other" / "checkpoints" / "ckpt_6"
    assert_one_line_error(training.try_it(two, **phase2(other)), "ckpt_7", "did not begin with", "leave")


def test_phase_2_stopped_before_its_first_step_leaves_phase_1s_checkpoint(training: Training, out: Path) -> None:
    stopping = {"FAILPOINT": "micro-step:6.0.0", "FAILPOINT_ACTION": "terminate"}
    before = (out / "checkpoints" / "ckpt_6" / "manifest.json").read_bytes()
    done = training.try_it(out, env=stopping, **phase2())
    assert done.returncode == 75, done.stdout
    assert (out / "checkpoints" / "ckpt_6" / "manifest.json").read_bytes() == before
    assert TrainState.read(out / "checkpoints" / "ckpt_6").phase == 1
    training.run(out, **phase2(out / "checkpoints" / "ckpt_6"))
    assert names(out)[""][:2] == ["ckpt_10", "ckpt_2"]


def test_phase_1_is_not_begun_again_where_phase_2_has_begun(training: Training, out: Path) -> None:
    training.run(out, **phase2(), steps_this_run=1)
    before = names(out), {name: (out / name).read_bytes() for name in ("results.json", "metrics.jsonl")}
    training.run(out, resume_ckpt=True, steps_this_run=6)  # it is finished: nothing to do
    assert before == (names(out), {name: (out / name).read_bytes() for name in before[1]})
    assert_one_line_error(training.try_it(out, resume_ckpt=True), "is of phase 2", "--resume_step 6")
    for name in ("ckpt_2", "ckpt_4", "ckpt_6"):
        shutil.rmtree(out / "checkpoints" / name)
    assert_one_line_error(training.try_it(out, resume_ckpt=True), "ckpt_7 is of phase 2", "another --output_dir")
    assert names(out) == {"": ["ckpt_7"]}


@pytest.mark.slow
def test_a_kill_while_checkpoints_are_set_aside_or_pruned_loses_nothing(
    training: Training, six: Path, straight: Path, tmp_path: Path
) -> None:
    words = {"resume_step": 2, "num_ckpts_to_keep": 1}
    log = tmp_path / "points"
    first = Path(shutil.copytree(six, tmp_path / "first"))
    training.run(first, env={"FAILPOINT": "none", "FAILPOINT_LOG": str(log)}, **words)
    points = list(dict.fromkeys(log.read_text().split()))
    wanted = [name for name in points if name.startswith(("set-aside", "prune"))]
    assert {name.split(":")[0] for name in wanted} == {"set-aside-before", "set-aside-after", "prune"}
    for name in wanted:
        out = Path(shutil.copytree(six, tmp_path / "killed"))
        assert training.try_it(out, env={"FAILPOINT": name}, **words).returncode == -signal.SIGKILL, name
        assert names(out)[""], name
        rolled_back = name.startswith("prune")
        training.run(out, **({"resume_ckpt": True, "num_ckpts_to_keep": 1} if rolled_back else words))
        assert names(out)[""] == ["ckpt_8"], name
        kept = {path.name for place in abandoned(out / "checkpoints") for path in place.glob("ckpt_*")}
        assert kept == {"ckpt_4", "ckpt_6"}, name
        assert_same_bytes(out / "checkpoints" / "ckpt_8", straight)
        shutil.rmtree(out)
