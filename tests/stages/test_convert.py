"""Checkpoints are converted from one format to another, with nothing lost, guessed or executed."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import CheckpointError
from tests.helpers.checkpoints import CONFIG, contents, snapshot, write_config, write_native
from tests.helpers.support import assert_one_line_error, forked, tensors
from trainer.checkpoint.interop import open_checkpoint
from trainer.models.config import ModelConfig
from trainer.state import TrainState

EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
#: The model with which the tutorial's script was run for its fixtures.
SCRIPT_MODEL = ModelConfig(
    vocab_size=8192, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128
)


def converted(*words: object) -> Path:
    """Run the command; returns the directory that is its second word."""
    done = forked("stages.convert", *words)
    assert done.returncode == 0, done.stdout
    return Path(str(words[1]))


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_the_scripts_checkpoint_through_ours_is_the_same(shared: Path, tmp_path: Path, form: str) -> None:
    source = shared / "fixtures" / "aws_dp" / form / "ckpt_10.pt"
    config = write_config(tmp_path / "config.json", SCRIPT_MODEL)
    native = converted(source, tmp_path / "native", "--config", config, "--tensor-parallel-size", 2) / "checkpoint"
    state = TrainState.read(native)
    assert (state.phase, state.global_step, state.tensor_parallel_size) == (1, 10, 2)
    back = converted(native, tmp_path / "back", "--to", "pt", "--warmup-steps", 0, "--max-steps", 20) / "ckpt_10.pt"
    was = torch.load(source, weights_only=True)
    for mapped in (False, True):
        found = torch.load(back, weights_only=True, mmap=mapped)
        assert list(found["model"]) == list(was["model"])
        assert all(torch.equal(found["model"][name], tensor) for name, tensor in was["model"].items())
        assert found["optimizer"]["state"].keys() == was["optimizer"]["state"].keys()
        for number, moments in was["optimizer"]["state"].items():
            assert found["optimizer"]["state"][number]["step"] == moments["step"]
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found["optimizer"]["state"][number][moment], moments[moment]), number
        # After 10 of 20 steps half of the peak rate is left, in the fixture as with the options above.
        assert found["optimizer"]["param_groups"] == was["optimizer"]["param_groups"]
        assert found["scheduler"] == was["scheduler"]


def test_what_only_the_script_needs_is_kept_from_pt_to_pt(shared: Path, tmp_path: Path) -> None:
    source = shared / "fixtures" / "aws_dp" / "fp32" / "ckpt_10.pt"
    config = write_config(tmp_path / "config.json", SCRIPT_MODEL)
    back = converted(source, tmp_path / "out", "--to", "pt", "--config", config) / "ckpt_10.pt"
    was, found = (torch.load(path, weights_only=True) for path in (source, back))
    assert {key: found[key] for key in ("files", "epoch", "scheduler")} == {
        key: was[key] for key in ("files", "epoch", "scheduler")
    }


def test_hugging_faces_model_and_a_torch_optimizer_resume_from_it(tmp_path: Path) -> None:
    """As the script does it: a strict load_state_dict, and an optimizer over its two groups."""
    from transformers import BertConfig, BertForPreTraining

    was = snapshot(step=7)
    data = tmp_path / "data"
    data.mkdir()
    for number in range(5):
        (data / f"x_training_{number}.hdf5").touch()
    native = write_native(tmp_path, was, 2)
    saved = torch.load(
        converted(native, tmp_path / "out", "--to", "pt", "--data-dir", data, "--lr", 3e-4) / "ckpt_7.pt",
        weights_only=True,
    )
    model = BertForPreTraining(BertConfig(**CONFIG.to_hugging_face()))
    model.load_state_dict(saved["model"], strict=True)
    named = list(model.named_parameters())
    without = [p for n, p in named if any(word in n for word in ("bias", "LayerNorm"))]
    decayed = [p for n, p in named if not any(word in n for word in ("bias", "LayerNorm"))]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": without, "weight_decay": 0.0}])
    optimizer.load_state_dict(saved["optimizer"])
    for name, parameter in named:
        assert torch.equal(parameter, was.model[name]), name
        state = optimizer.state[parameter]
        assert state["step"] == 7
        assert torch.equal(state["exp_avg"], was.optimizer[f"exp_avg.{name}"]), name
        assert torch.equal(state["exp_avg_sq"], was.optimizer[f"exp_avg_sq.{name}"]), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert saved["scheduler"]["base_lrs"] == [3e-4, 3e-4]
    assert saved["files"][0] == 0
    assert sorted(saved["files"][1:]) == sorted(map(str, data.iterdir()))


def test_moments_of_an_earlier_training_keep_their_number_of_updates(tmp_path: Path) -> None:
    """After 4 steps on other data and 7 of the phase (--new_data): those of 11; the schedule is at 7."""
    was = snapshot(step=7)
    was = dataclasses.replace(was, state=dataclasses.replace(was.state, steps_before=4))
    saved = torch.load(
        converted(write_native(tmp_path, was), tmp_path / "out", "--to", "pt") / "ckpt_7.pt", weights_only=True
    )
    assert {moments["step"] for moments in saved["optimizer"]["state"].values()} == {11}
    assert saved["scheduler"]["last_epoch"] == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lr", "-1"), "--lr is -1.0; allowed: a number 0 or more"),
        (("--weight-decay", "-0.1"), "--weight-decay is -0.1; allowed: a number 0 or more"),
        (("--max-steps", "0"), "--max-steps is 0; allowed: a whole number 1 or more"),
        (("--warmup-steps", "11", "--max-steps", "10"), "warmup_steps = 11 is more than max_steps = 10; lower it"),
    ],
)
def test_a_schedule_that_no_training_takes_is_not_written(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = forked("stages.convert", write_native(tmp_path, snapshot(step=7)), tmp_path / "out", "--to", "pt", *words)
    assert_one_line_error(done, said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["hf", "native", "pt"])
def test_a_step_that_the_source_contradicts_is_refused(tmp_path: Path, form: str) -> None:
    native = write_native(tmp_path, snapshot(step=7))
    done = forked("stages.convert", native, tmp_path / "out", "--to", form, "--step", 9)
    assert_one_line_error(done, f"{native} is of step 7, not 9; leave --step out")
    converted(native, tmp_path / "out", "--to", form, "--step", 7)


def test_another_model_than_bert_is_one_line(tmp_path: Path) -> None:
    was = snapshot()
    mlp = dataclasses.replace(was.state, model={"architecture": "MLP", "layers": [784, 120, 84, 10]})
    native = write_native(tmp_path, dataclasses.replace(was, state=mlp))
    with pytest.raises(CheckpointError, match="ckpt_7 holds no BERT .* has architecture = MLP; give"):
        open_checkpoint(native)


def test_any_size_from_any_size(tmp_path: Path) -> None:
    whole = write_native(tmp_path, snapshot())
    two = converted(whole, tmp_path / "two", "--tensor-parallel-size", 2) / "checkpoint"
    four = converted(two, tmp_path / "four", "--tensor-parallel-size", 4) / "checkpoint"
    assert contents(converted(four, tmp_path / "one") / "checkpoint") == contents(whole)
    assert contents(converted(four, tmp_path / "again", "--tensor-parallel-size", 2) / "checkpoint") == contents(two)


def test_a_size_that_does_not_divide_is_one_line(tmp_path: Path) -> None:
    done = forked("stages.convert", write_native(tmp_path, snapshot()), tmp_path / "out", "--tensor-parallel-size", 3)
    assert_one_line_error(done, "tensor_parallel_size = 3 does not divide num_attention_heads = 4")


def test_nvidias_names_and_a_checkpoint_without_optimizer(tmp_path: Path) -> None:
    was = snapshot(optimizer=False).model
    theirs = {
        f"module.{name}".replace("intermediate.dense", "intermediate.dense_act")
        .replace("pooler.dense", "pooler.dense_act")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in was.items()
    }
    theirs["module.cls.predictions.decoder.weight"] = was[EMBEDDINGS]
    theirs["module.bert.embeddings.position_ids"] = torch.arange(64)[None]
    source = tmp_path / "ckpt_28125.pt"
    torch.save({"model": theirs, "files": [0], "epoch": 1}, source)
    native = converted(source, tmp_path / "out", "--config", write_config(tmp_path / "config.json")) / "checkpoint"
    found = tensors(native)
    assert set(found) == set(was)
    assert all(torch.equal(torch.from_numpy(found[name]), tensor) for name, tensor in was.items())
    assert TrainState.read(native).global_step == 28125


def test_the_published_model_needs_no_config(tmp_path: Path) -> None:
    """Its shapes are those of BERT-tiny; of a model with other shapes the number of heads is not known."""
    config = ModelConfig.preset("tiny", vocab_size=203, max_position_embeddings=64)
    source = tmp_path / "ckpt_3.pt"
    torch.save({"model": snapshot(config=config, optimizer=False).model}, source)
    native = converted(source, tmp_path / "out") / "checkpoint"
    assert TrainState.read(native).model["num_attention_heads"] == 2
    torch.save({"model": snapshot(optimizer=False).model}, source)
    assert_one_line_error(forked("stages.convert", source, tmp_path / "b"), "no file says its num_attention_heads")


@pytest.mark.parametrize("form", ["safetensors", "bin", "shards", "bin shards"])
def test_hugging_face_directories(tmp_path: Path, form: str) -> None:
    was = snapshot(optimizer=False)
    source = tmp_path / "hf"
    source.mkdir()
    write_config(source / "config.json")
    parts = [dict(list(was.model.items())[:9]), dict(list(was.model.items())[9:])]
    if form == "safetensors":
        save_file(was.model, source / "model.safetensors", {"format": "pt"})
    elif form == "bin":
        model = {**was.model, "cls.predictions.decoder.weight": was.model[EMBEDDINGS]}
        torch.save(model, source / "pytorch_model.bin")
    else:
        stem, end = ("model", "safetensors") if form == "shards" else ("pytorch_model", "bin")
        places = {}
        for number, part in enumerate(parts):
            name = f"{stem}-{number}.{end}"
            save_file(part, source / name) if form == "shards" else torch.save(part, source / name)
            places |= dict.fromkeys(part, name)
        (source / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": places}))
    native = converted(source, tmp_path / "out", "--step", 12) / "checkpoint"
    found = load_file(native / "model-00-of-01.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in was.model.items())
    assert TrainState.read(native).global_step == 12
    if "shards" in form:
        shard = next(path for path in source.iterdir() if path.name.endswith(("-1.safetensors", "-1.bin")))
        shard.unlink()
        assert_one_line_error(forked("stages.convert", source, tmp_path / "b"), f"{shard.name} is missing")


def test_what_convert_writes_for_hugging_face_is_loaded(tmp_path: Path) -> None:
    from transformers import BertForPreTraining

    was = snapshot()
    model = converted(write_native(tmp_path, was), tmp_path / "out", "--to", "hf") / "model"
    loaded = BertForPreTraining.from_pretrained(model)
    assert all(torch.equal(parameter, was.model[name]) for name, parameter in loaded.named_parameters())


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("where", ["file", "model", "legacy", "xser"])
def test_a_pickle_is_never_executed(shared: Path, tmp_path: Path, where: str) -> None:
    evil, source = Evil(tmp_path / "executed"), tmp_path / "ckpt_1.pt"
    if where == "file":
        torch.save({"model": {}, "epoch": evil}, source)
    elif where == "model":
        torch.save({"model": {**snapshot().model, "x": evil}}, source)
    elif where == "legacy":
        source.write_bytes(pickle.dumps({"model": evil}))
    else:
        source = tmp_path / "nxd"
        shutil.copytree(shared / "fixtures" / "nxd_tp2" / "checkpointing_save_xser_xladev", source)
        tensor = source / "tp_rank_01_pp_rank_00.tensors" / "tensor_3.pt"
        tensor.unlink()
        torch.save(evil, tensor)
    for words in ((source, tmp_path / "out"), ("--inspect", source)):
        done = forked("stages.convert", *words)
        assert_one_line_error(done, *(["neither a tensor nor a plain container"] if where != "legacy" else []))
    assert not (tmp_path / "executed").exists()


def test_files_that_are_cut_short_or_something_else_are_one_line(shared: Path, tmp_path: Path) -> None:
    whole = (shared / "fixtures" / "aws_dp" / "fp32" / "ckpt_10.pt").read_bytes()
    source = tmp_path / "ckpt_10.pt"
    for content, said in ((whole[:-5000], "damaged, cut short"), (b"", "damaged, cut short"), (b"text", "ckpt_10.pt")):
        source.write_bytes(content)
        assert_one_line_error(forked("stages.convert", source, tmp_path / "out"), str(source), said)
    torch.save({"weights": torch.ones(2)}, source)
    assert_one_line_error(forked("stages.convert", source, tmp_path / "out"), "lacks bert.embeddings.LayerNorm.weight")
    torch.save({"weights": [torch.ones(2)]}, source)
    assert_one_line_error(forked("stages.convert", source, tmp_path / "out"), "holds no model: its keys are weights")
    (tmp_path / "empty").mkdir()
    assert_one_line_error(
        forked("stages.convert", tmp_path / "empty", tmp_path / "out"), "not a checkpoint of a known format"
    )
    assert_one_line_error(forked("stages.convert", tmp_path / "no", tmp_path / "out"), "there is no checkpoint")


def test_a_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    model: dict[str, Tensor] = {**snapshot().model, "module.bert.pooler.dense.bias": torch.ones(32)}
    torch.save({"model": model}, tmp_path / "ckpt_1.pt")
    done = forked("stages.convert", tmp_path / "ckpt_1.pt", tmp_path / "out")
    assert_one_line_error(done, "holds bert.pooler.dense.bias twice", "module.bert.pooler.dense.bias")


def test_an_optimizer_of_unknown_order_is_refused_and_can_be_left_out(tmp_path: Path) -> None:
    model = snapshot().model
    optimizer = {"state": {}, "param_groups": [{"params": [0, 1, 2]}, {"params": [3]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "ckpt_1.pt")
    words = (tmp_path / "ckpt_1.pt", tmp_path / "out", "--config", write_config(tmp_path / "config.json"))
    assert_one_line_error(forked("stages.convert", *words), "groups of 3, 1", "--no-optimizer")
    assert not list((converted(*words, "--no-optimizer") / "checkpoint").glob("optimizer*"))


def test_an_unfinished_save_of_neuronx_distributed_is_refused(shared: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(shared / "fixtures" / "nxd_tp2" / "trainer_save" / "step_4", tmp_path / "step_4"))
    (source / "done").unlink()
    assert_one_line_error(forked("stages.convert", source, tmp_path / "out"), "no file 'done'", "never finished")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("aws_dp/bf16/ckpt_10.pt", ["pt: ", "step:       10", "bfloat16", "tensor parallel 1", "641,026 values"]),
        (
            "nxd_tp2/trainer_save",
            ["trainer.save_checkpoint, plain", "step:       4", "tensor parallel 2", "92 tensors"],
        ),
        ("nxd_tp2/checkpointing_save_xser_xladev", ["checkpointing.save, xser", "step:       4", "tensor parallel 2"]),
    ],
)
def test_inspect_says_what_it_is(shared: Path, path: str, words: list[str]) -> None:
    done = forked("stages.convert", "--inspect", shared / "fixtures" / path)
    assert done.returncode == 0, done.stdout
    for word in words:
        assert word in done.stdout


def test_inspect_of_ours_and_of_hugging_face(tmp_path: Path) -> None:
    split = write_native(tmp_path, snapshot(), 2)
    done = forked("stages.convert", "--inspect", split)
    for word in (
        "native: ",
        "step:       7",
        "2 layers, hidden size 32, 4 heads",
        "vocabulary 203",
        "tensor parallel 2",
    ):
        assert word in done.stdout, done.stdout
    model = converted(split, tmp_path / "out", "--to", "hf", "--no-optimizer") / "model"
    done = forked("stages.convert", "--inspect", model)
    assert "hf: Hugging Face directory, one file (safetensors)" in done.stdout
    assert "optimizer:  none" in done.stdout
