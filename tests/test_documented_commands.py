"""Every command in README.md, docs and the configurations' headers is accepted by its program, and those next to a
tutorial's command train on the same device, in the same precision, with the same global batch."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from luigi.cmdline_parser import CmdlineParser
from torch.distributed.run import parse_args

from common.errors import UserError
from pipeline.__main__ import _parse, _split_settings
from pipeline.commands.why import find
from tests.helpers.documented import PAGES, Documented, commands
from tests.helpers.images import write_images
from tests.helpers.neuron_machine import machine
from tests.helpers.support import ROOT, command, synthetic_rows
from trainer.data.shards import write_shard
from trainer.devices.select import automatic
from trainer.options import parse, to_config
from trainer.parallel.mesh import Mesh

COMMANDS = commands()
#: Text on the tutorial's side of a row → (device, precision, global batch) of the tutorial's command.
BERT_PHASE1, BERT_PHASE2 = ("neuron", "bf16-sr", 16384), ("neuron", "bf16-sr", 32768)
TUTORIALS = {
    # bert-pretraining.rst: XLA_USE_BF16=1 is "full BFloat16 casting and stochastic rounding"; "global batch size of
    # 16384 for phase 1", "of 32768" in phase 2.
    "torchrun --nproc_per_node=32 dp_bert_large_hf_pretrain_hdf5.py --steps_this_run 10": BERT_PHASE1,
    "torchrun --nproc_per_node=32 dp_bert_large_hf_pretrain_hdf5.py --batch_size 16": BERT_PHASE1,
    "--nnodes=2 --node_rank=0 --master_addr=<root IP> --master_port=2020 dp_bert_large": BERT_PHASE1,
    "torchrun --nproc_per_node=32 dp_bert_large_hf_pretrain_hdf5.py --data_dir … --lr 2.8e-4 --phase2": BERT_PHASE2,
    # tensor-parallel.rst: "the data-parallel degree to 4"; 64 × 64 × 4.
    "tp_dp_bert_large_hf_pretrain_hdf5.py --tensor_parallel_size 8": BERT_PHASE1,
    # mnist-mlp.rst: fp32, 32 images a worker.
    "`python train_cpu.py`": ("cpu", "fp32", 32),
    "`python3 train.py`": ("neuron", "fp32", 32),
    "torchrun --nproc_per_node=1 train_torchrun.py": ("neuron", "fp32", 32),
    "torchrun --nproc_per_node=2 train_torchrun.py": ("neuron", "fp32", 64),
    "--nnodes=2 --node_rank=0 --master_addr=<root IP> --master_port=2020 train_torchrun.py": ("neuron", "fp32", 2048),
    # ddp.rst: a toy model in fp32 on 2 workers; here the MLP, with the MLP's batch.
    "ddp_xmp_spawn.py": ("neuron", "fp32", 64),
    "`torchrun --nproc_per_node=2 ddp_torchrun.py`": ("neuron", "fp32", 64),
    "--nnodes=2 --node_rank=0 --master_addr=<root IP> --master_port=2020 ddp_torchrun.py": ("neuron", "fp32", 128),
}


def expected(documented: Documented) -> tuple[str, str, int] | None:
    found = [values for fragment, values in TUTORIALS.items() if fragment in documented.tutorial]
    assert len(found) <= 1, documented
    return found[0] if found else None


def trainers(documented: Documented) -> tuple[list[str], list[str]] | None:
    """torchrun's words and the trainer's; None if the command does not run the trainer."""
    words = list(documented.words)
    if "trainer" not in words:
        return None
    at = words.index("trainer")
    launcher = words[1:at] if words[0] == "torchrun" else words[3:at]
    return (launcher[:-1] if launcher else []), words[at + 1 :]


def test_there_are_commands_of_each_kind_and_a_row_for_each_tutorial() -> None:
    """So that the other tests do not pass by finding nothing."""
    assert len(COMMANDS) > 80
    assert sum(trainers(found) is not None for found in COMMANDS) >= 12
    assert sum(found.words[0] == "luigi" for found in COMMANDS) > 30
    for fragment in TUTORIALS:
        assert any(fragment in found.tutorial for found in COMMANDS if found.page == "tutorials.md"), fragment


@pytest.mark.parametrize("found", [c for c in COMMANDS if c.words[2].startswith("stages.")], ids=str)
def test_stages_take_their_options(found: Documented) -> None:
    if "NAME" not in found.words[2]:
        importlib.import_module(found.words[2]).parser().parse_args(found.words[3:])


def taken_by_the_pipeline(words: tuple[str, ...]) -> None:
    """Parse as `pipeline.__main__.main` does; raises `SystemExit` or `UserError` if that would refuse them."""
    ours, given = _split_settings(words)
    args, unknown = _parse(ours)
    with CmdlineParser.global_instance(["BertPhase2", *given, *unknown]):
        if not getattr(args, "task", "TASK").isupper():  # otherwise it is to be filled in
            find(args.task, args.phase)


@pytest.mark.parametrize("found", [c for c in COMMANDS if c.words[1:3] == ("-m", "pipeline") and c.words[3:]], ids=str)
def test_the_pipelines_commands_take_their_options(found: Documented) -> None:
    taken_by_the_pipeline(found.words[3:])


@pytest.mark.parametrize("words", ["doctor --mesure", "why BertPhase2 more", "why BertPhase9", "status --Phase1-lrr 1"])
def test_a_wrong_word_would_be_found(words: str) -> None:
    with pytest.raises((SystemExit, UserError)):
        taken_by_the_pipeline(tuple(words.split()))


def test_targets_of_make_and_extras_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {target for line in targets for target in line.split()}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    text = "\n".join(page.read_text() for page in (ROOT / "CONTRIBUTING.md", *PAGES))
    made = set(re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", text, re.MULTILINE))
    asked = {extra for found in re.findall(r"(?:'\.|pipeline)\[([a-z, -]+)\]", text) for extra in found.split(",")}
    assert {"run", "test", "bench"} <= made <= targets
    assert {"parquet", "mlflow"} <= asked <= extras


#: Takes lists of luigi's words, as JSON; prints what each trains with.
_RESOLVE = """
import json, sys
import luigi.cmdline_parser
from luigi.task_register import Register
resolved = []
for words in json.loads(sys.argv[1]):
    Register.clear_instance_cache()
    with luigi.cmdline_parser.CmdlineParser.global_instance(words) as parser:
        import pipeline.settings.load
        pipeline.settings.load.load.cache_clear()
        task, s = parser.get_task_obj(), pipeline.settings.load.load()
        workers = s.cluster.workers // s.cluster.tensor_parallel_size
        if "Mlp" in type(task).__name__:
            resolved.append((s.cluster.device, s.mnist.precision, s.mnist.batch_size * workers))
        else:
            phase = s.phase(getattr(task, "phase", 1))
            resolved.append((s.cluster.device, s.precision.mode, phase.global_batch_size))
json.dump(resolved, sys.stdout)
"""


@pytest.mark.slow
def test_luigi_takes_its_commands_and_they_train_as_the_tutorials_do() -> None:
    by_config = defaultdict(list)
    for found in COMMANDS:
        if found.words[0] == "luigi":
            by_config[found.config].append(found)
    for config, all_found in by_config.items():
        words = [list(found.words[1:]) for found in all_found]
        env = {"LUIGI_CONFIG_PATH": config} if config else {}
        done = command("-c", _RESOLVE, json.dumps(words), env=env)
        assert done.returncode == 0, (config, done.stderr)
        for found, resolved in zip(all_found, json.loads(done.stdout), strict=True):
            wanted = expected(found)
            if wanted is not None:
                assert tuple(resolved) == wanted, found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each kind of command, as many samples as its global batch needs: a few, repeated."""
    directory = tmp_path_factory.mktemp("data")
    found = {"mnist": write_images(directory / "mnist", training=2048)}
    for name, S, P, rows in (("phase1", 128, 20, 16384), ("phase2", 512, 80, 32768)):
        arrays = synthetic_rows(16, seq_len=S, max_pred_len=P, seed=0)
        (directory / name).mkdir()
        many = {key: np.tile(array, (rows // 16,) + (1,) * (array.ndim - 1)) for key, array in arrays.items()}
        write_shard(directory / name / "x_training_0.hdf5", many)
        found[name] = directory / name
    return found


@pytest.mark.parametrize("found", [c for c in COMMANDS if trainers(c) is not None], ids=str)
def test_the_trainer_takes_its_options_and_trains_as_the_tutorial_does(
    found: Documented, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with NeuronCores."""
    split = trainers(found)
    assert split is not None
    launcher, words = split
    if "--help" in words:
        return
    given = parse(words)
    if given.run.doctor:
        return
    workers, nodes = given.run.spawn or 1, 1
    if launcher:
        started = parse_args([*launcher, "-m", "trainer"])
        workers, nodes = int(started.nproc_per_node), int(started.nnodes.partition(":")[0])
    for name, value in machine(tmp_path, cores=[2] * 16).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(tmp_path / "site")
    directory = data["mnist" if given.run.workload == "mnist" else "phase2" if given.run.phase2 else "phase1"]
    given = parse([*words, f"--data_dir={directory}", f"--output_dir={tmp_path / 'output'}"])
    size = given.config.tensor_parallel_size
    mesh = Mesh(world_size=workers * nodes, local_world_size=workers, tensor_parallel_size=size)
    config, _ = to_config(given, mesh)
    device = automatic() if config.device == "auto" else config.device
    resolved = device, config.wanted_precision, config.global_batch_size(mesh.data_parallel_size)
    wanted = expected(found)
    if wanted is not None:
        assert resolved == wanted


def test_every_command_of_the_tutorials_has_its_place(shared: Path) -> None:
    """Every script that their shell blocks run, and the programs used with them, is in docs/tutorials.md."""
    here, names = (ROOT / "docs" / "tutorials.md").read_text(), set()
    for page in sorted((shared / "tutorials").glob("*.rst")):
        text = page.read_text()
        names |= set(re.findall(r"(?:python3?|torchrun[^\n`]*|^ +) ?\b(\w+\.py)\b", text, re.MULTILINE))
        names |= set(re.findall(r"^ +(?:[A-Z_]+=\S+ )*(neuron[-_]\w+|tensorboard|aws s3 cp|tar)\b", text, re.MULTILINE))
    assert {"train_torchrun.py", "ddp_xmp_spawn.py", "dp_bert_large_hf_pretrain_hdf5.py", "tensorboard"} <= names
    assert not {name for name in names if name not in here}
