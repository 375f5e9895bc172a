"""What the tutorials' scripts and launchers pass on: their checkpoints, `--local_rank`, the machine's own device."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.helpers.neuron_machine import hardware, machine
from tests.helpers.support import VOCAB as IDS
from tests.helpers.support import (
    assert_one_line_error,
    command,
    forked,
    options,
    require_torch_xla,
    train,
    write_dataset,
)

GIVEN = {"batch_size": 4, "grad_accum_usteps": 1, "max_steps": 2, "warmup_steps": 1, "max_pred_len": 5}
TINY = {"model": "tiny", "vocab_size": IDS, "device": "cpu", **GIVEN}


@pytest.fixture(scope="module")
def script_output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data, and a directory as the script leaves it: with `ckpt_2.pt`."""
    directory = tmp_path_factory.mktemp("script")
    data = write_dataset(directory / "data", [40])
    assert train(data_dir=data, output_dir=directory / "ours", **TINY).returncode == 0
    ours = directory / "ours" / "checkpoints" / "ckpt_2"
    done = forked("stages.convert", ours, directory / "output", "--to", "pt", "--data-dir", data)
    assert done.returncode == 0, done.stdout
    assert (directory / "output" / "ckpt_2.pt").exists()
    return data, directory / "output"


@pytest.mark.parametrize("named", [False, True])
def test_the_message_leads_from_the_scripts_checkpoint_to_phase_2(
    script_output: tuple[Path, Path], tmp_path: Path, named: bool
) -> None:
    """The tutorial's command fails with one line; doing what it says makes it train."""
    data, theirs = script_output
    out = tmp_path / "output"
    out.mkdir()
    shutil.copy(theirs / "ckpt_2.pt", out)
    phase2 = {"data_dir": data, "output_dir": out, "phase2": True, "resume_ckpt": True, "phase1_end_step": 2, **TINY}
    path = {"resume_ckpt_path": out / "ckpt_2.pt"} if named else {}
    refused = train(**phase2, **path)
    assert_one_line_error(refused, f"{out}/ckpt_2.pt is a checkpoint of the tutorial's script")
    advice = re.search(r"python (-m stages.convert \S+ \S+); then add (--resume_ckpt_path) (\S+)", refused.stdout)
    assert advice is not None, refused.stdout
    assert command(*shlex.split(advice[1])).returncode == 0
    done = train(**phase2, resume_ckpt_path=advice[3])
    assert done.returncode == 0, done.stdout
    assert "starting phase 2 at step 2 with the weights of" in done.stdout
    assert (out / "checkpoints" / "ckpt_4" / "manifest.json").exists()


def test_phase_1_does_not_begin_anew_beside_the_scripts_checkpoint(
    script_output: tuple[Path, Path], tmp_path: Path
) -> None:
    data, theirs = script_output
    out = tmp_path / "output"
    out.mkdir()
    shutil.copy(theirs / "ckpt_2.pt", out)
    refused = train(data_dir=data, output_dir=out, resume_ckpt=True, **TINY)
    assert_one_line_error(refused, "ckpt_2.pt is a checkpoint of the tutorial's script", "another --output_dir")


@pytest.mark.parametrize("name", ["--local_rank", "--local-rank"])
def test_local_rank_is_taken(data: Path, model: Path, tmp_path: Path, name: str) -> None:
    """Under a launcher that sets LOCAL_RANK as well; without one, several workers cannot know of each other."""
    given = options(data_dir=data, model_config=model, output_dir=tmp_path / "out", device="cpu", **GIVEN)
    done = forked("trainer", *given, f"{name}=0")
    assert done.returncode == 0, done.stdout
    refused = command("-m", "trainer", *given, f"{name}=1")
    assert_one_line_error(refused, "--local_rank 1 without LOCAL_RANK", "torchrun")


@pytest.mark.slow
def test_auto_is_the_machines_neuron_cores(data: Path, model: Path, tmp_path: Path) -> None:
    require_torch_xla()
    given = {"data_dir": data, "model_config": model, **GIVEN, "precision": "fp32", "max_steps": 1, "warmup_steps": 0}
    env = machine(tmp_path / "machine")
    done = command("-m", "trainer", *options(**given, output_dir=tmp_path / "neuron"), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device neuron-xla, since torch-neuronx" in done.stdout
    words = options(**given, output_dir=tmp_path / "cpu")
    without_xla = command("-m", "trainer", *words, env={**env, "DISABLE_XLA": "1"})
    assert "device cpu, " in without_xla.stdout, without_xla.stdout + without_xla.stderr
    words[-1] = str(tmp_path / "bare")
    bare = command("-m", "trainer", *words, env=hardware(tmp_path / "bare_machine", cores=[2]))
    assert "device cpu, " in bare.stdout, bare.stdout + bare.stderr
    assert "warning: device auto is the CPU, although there are 2 NeuronCores here" in bare.stdout
