"""Shards, ours and neuronx-distributed's, are merged into one Hugging Face model: bit for bit, or not at all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.errors import UserError
from common.secrets import Secret
from stages.convert import ConvertOptions, convert
from stages.directory.manifest import StageDirectory
from stages.merge import MergeOptions, merge
from stages.tokens.wordpiece import save_tokenizer
from stages.transfer.checkpoint_source import opened
from tests.conftest import Disk
from tests.helpers.checkpoints import CONFIG, contents, rewrite, snapshot, write_config, write_native
from tests.helpers.support import ROOT, assert_one_line_error, forked
from trainer.checkpoint.interop import chunks
from trainer.data.vocabulary import SPECIAL_TOKENS, read_vocabulary
from trainer.models.config import ModelConfig

EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
POOLER = "bert.pooler.dense.weight"

NXD_FORMS = ("checkpointing_save", "checkpointing_save_xser_xladev", "trainer_save/step_4", "trainer_save_xser")


@pytest.fixture(scope="module")
def reference(shared: Path) -> dict[str, Any]:
    """neuronx-distributed's model, gathered without its own savers."""
    loaded: dict[str, Any] = torch.load(shared / "fixtures" / "nxd_tp2" / "reference.pt", weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def nxd_config(reference: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nxd") / "config.json"
    path.write_text(json.dumps(reference["config"]))
    return path


def merged(*words: object) -> Path:
    """Run the command; returns the directory that it makes in its second word."""
    done = forked("stages.merge", *words)
    assert done.returncode == 0, done.stdout
    return Path(str(words[1])) / "model"


@pytest.mark.parametrize("form", NXD_FORMS)
def test_shards_of_neuronx_distributed_are_the_reference(
    shared: Path, tmp_path: Path, reference: dict[str, Any], nxd_config: Path, form: str
) -> None:
    source = shared / "fixtures" / "nxd_tp2" / form
    model = merged(source, tmp_path / "out", "--config", nxd_config, "--with-optimizer")
    parameters = load_file(model / "model.safetensors")
    whole = reference["model_step4_merged"]
    assert set(whole) - set(parameters) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    for name, tensor in parameters.items():
        assert torch.equal(tensor, whole[name]), name
    moments = load_file(model / "optimizer.safetensors")
    expected = {
        f"{moment}.{name}": state[moment]
        for name, state in reference["optimizer_step4_merged_by_name"].items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    assert set(moments) == set(expected)
    assert all(torch.equal(moments[name], tensor) for name, tensor in expected.items())


def test_hugging_face_loads_it_and_gives_the_reference(
    shared: Path, tmp_path: Path, reference: dict[str, Any], nxd_config: Path
) -> None:
    from transformers import BertForPreTraining

    source = shared / "fixtures" / "nxd_tp2" / "checkpointing_save"
    model = merged(source, tmp_path / "out", "--config", nxd_config, "--max-shard-size", "150kB")
    files = sorted(model.glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 160_000 for path in files)
    loaded, report = BertForPreTraining.from_pretrained(model, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.config.num_attention_heads == 4
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, reference["model_step4_merged"][name]), name


@pytest.mark.parametrize("size", [2, 4])
def test_split_merge_split_gives_the_same_bytes(tmp_path: Path, size: int) -> None:
    state = snapshot()
    split = write_native(tmp_path, state, size)
    assert len(list(split.glob("model-*.safetensors"))) == size
    model = merged(split, tmp_path / "merged", "--with-optimizer")
    found = load_file(model / "model.safetensors")
    assert set(found) == set(state.model)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.model.items())
    moments = load_file(model / "optimizer.safetensors")
    assert all(torch.equal(moments[name], tensor) for name, tensor in state.optimizer.items())
    assert forked("stages.convert", model, tmp_path / "again", "--tensor-parallel-size", size).returncode == 0
    again = contents(tmp_path / "again" / "checkpoint")
    assert {n: b for n, b in again.items() if n.startswith("model")} == {
        n: b for n, b in contents(split).items() if n.startswith("model")
    }


def test_bf16_is_torchs_rounding_and_hugging_face_takes_it(tmp_path: Path) -> None:
    from transformers import BertForPreTraining

    state = snapshot()
    model = merged(write_native(tmp_path, state, 2), tmp_path / "out", "--dtype", "bf16")
    found = load_file(model / "model.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in state.model.items())
    assert not (model / "optimizer.safetensors").exists()
    assert BertForPreTraining.from_pretrained(model, dtype="auto").dtype == torch.bfloat16


MEASURE = """
import json, resource, sys
from pathlib import Path
from transformers import BertForPreTraining
from stages import merge
from stages.directory.manifest import StageDirectory
BertForPreTraining
from common.errors import UserError
from common.secrets import Secret
options = merge.MergeOptions(source=Secret.address(sys.argv[1]))
with StageDirectory.begin(Path(sys.argv[2]), options.identity) as work:
    merge.merge(work, options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_bytes(source: Path, out: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, source, out], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """BERT-base, 440 MB in 4 shards: all of it in memory would be well over the largest tensor plus 200 MB."""
    config = ModelConfig.preset("base")
    large = write_native(tmp_path, snapshot(config=config, optimizer=False), 4)
    shutil.rmtree(tmp_path / "whole-0")
    small = write_native(tmp_path, snapshot(step=8), 4)
    extra = peak_bytes(large, tmp_path / "a") - peak_bytes(small, tmp_path / "b")
    largest = config.vocab_size * config.hidden_size * 4
    assert extra <= largest + 200e6 < 110e6 * 4


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors.get(name, torch.ones(2)))})


def nan(tensor: Tensor) -> Tensor:
    tensor.view(-1)[1] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(QUERY), ["model-01-of-02.safetensors lacks", QUERY]),
        (put("bert.extra.weight", lambda t: t), ["holds bert.extra.weight", "model does not have"]),
        (put(QUERY, Tensor.bfloat16), [f"{QUERY} is torch.bfloat16, on rank 0 it is torch.float32"]),
        (put(QUERY, lambda t: t[:-1]), [QUERY, "has shape (15, 32)", "(16, 32) on each of 2 ranks"]),
        (put(POOLER, lambda t: t + 1), [POOLER, "differs from", "ranks 0 and 1 must agree"]),
        (put(QUERY, nan), [QUERY, "not finite"]),
    ],
    ids=["missing", "extra", "dtype", "shape", "replicated", "nan"],
)
def test_a_wrong_shard_is_refused_by_the_tensors_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: list[str]
) -> None:
    split = write_native(tmp_path, snapshot(optimizer=False), 2)
    rewrite(split, change)
    done = forked("stages.merge", split, tmp_path / "out")
    assert_one_line_error(done, *words)
    assert not (tmp_path / "out" / "model").exists()


def test_a_shard_of_another_step_is_refused(tmp_path: Path) -> None:
    split = write_native(tmp_path, snapshot(optimizer=False), 2)
    rewrite(split, lambda tensors: None, step="6")
    assert_one_line_error(forked("stages.merge", split, tmp_path / "out"), "model-01-of-02", "is of step 6", "step 7")


def test_a_shard_of_another_run_is_refused(tmp_path: Path) -> None:
    split, other = (write_native(tmp_path, snapshot(seed=seed, optimizer=False), 2) for seed in (0, 1))
    shutil.copy(other / "model-01-of-02.safetensors", split)
    assert_one_line_error(forked("stages.merge", split, tmp_path / "out"), "model-01-of-02", "differs from", "one save")
    rewrite(split, lambda tensors: None)  # even if the manifest says that it belongs there
    assert_one_line_error(
        forked("stages.merge", split, tmp_path / "out2"), "model-01-of-02", "differs from", "one save"
    )


def test_one_changed_bit_of_a_split_tensor_is_found(tmp_path: Path) -> None:
    split = write_native(tmp_path, snapshot(optimizer=False), 2)
    path = split / "model-01-of-02.safetensors"
    whole = bytearray(path.read_bytes())
    header = int.from_bytes(whole[:8], "little")
    whole[8 + header] ^= 1  # the lowest bit of the first word embedding
    path.write_bytes(whole)
    done = forked("stages.merge", split, tmp_path / "out")
    assert_one_line_error(done, str(path), "sha256 is not the manifest's")
    assert not (tmp_path / "out" / "model").exists()


def test_a_missing_or_short_shard_is_named(tmp_path: Path) -> None:
    split = write_native(tmp_path, snapshot(optimizer=False), 2)
    path = split / "model-01-of-02.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert_one_line_error(forked("stages.merge", split, tmp_path / "out"), path.name, f"instead of {len(whole)}")
    path.unlink()
    assert_one_line_error(forked("stages.merge", split, tmp_path / "out"), f"{path.name} is missing")


@pytest.fixture
def nxd(shared: Path, tmp_path: Path) -> Path:
    """A copy of a plain checkpoint of neuronx-distributed, to be damaged."""
    return Path(shutil.copytree(shared / "fixtures" / "nxd_tp2" / "checkpointing_save", tmp_path / "nxd"))


def alter(nxd: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    path = nxd / f"tp_rank_{rank:02}_pp_rank_00" / "checkpoint.pt"
    path.chmod(0o644)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def in_model(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"].update({name: change(content["model"][name])})


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (1, lambda c: c.update(global_step=3), ["tp_rank_01", "is of step 3", "of 4"]),
        (1, in_model(POOLER, lambda t: t + 1), [POOLER, "ranks 0 and 1 must agree"]),
        (1, in_model(QUERY, lambda t: t.repeat(2, 1)), [QUERY, "(64, 64)", "(32, 64) on each of 2 ranks"]),
        (1, lambda c: c["model"].pop(QUERY), ["tp_rank_01", f"lacks {QUERY}"]),
        (1, in_model(QUERY, Tensor.double), [f"{QUERY} is torch.float64"]),
        (0, in_model("cls.predictions.decoder.weight", lambda t: t + 1), ["decoder.weight differs from", EMBEDDINGS]),
        (1, lambda c: c["model"].update(x="text"), ["x in model is a str, not a tensor"]),
    ],
    ids=["step", "replicated", "shape", "missing", "dtype", "untied", "no tensor"],
)
def test_a_wrong_shard_of_neuronx_distributed_is_refused(
    nxd: Path, nxd_config: Path, tmp_path: Path, rank: int, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    alter(nxd, rank, change)
    assert_one_line_error(forked("stages.merge", nxd, tmp_path / "out", "--config", nxd_config), *words)


def in_moments(change: Callable[[dict[str, Any]], None], *, only_first: bool) -> Callable[[dict[str, Any]], None]:
    def altered(content: dict[str, Any]) -> None:
        for state in list(content["optimizer"]["state"].values())[: 1 if only_first else None]:
            change(state)

    return altered


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_moments(lambda s: s.update(step=torch.tensor(3.0)), only_first=True), ["are at different steps"]),
        (in_moments(lambda s: s.update(step=torch.tensor(3.0)), only_first=False), ["optimizer step 3"]),
        (in_moments(lambda s: s.pop("exp_avg_sq"), only_first=True), ["lacks exp_avg_sq"]),
        (lambda c: c.pop("optimizer"), ["optimizer"]),
    ],
    ids=["one parameter", "one rank", "a moment", "all of it"],
)
def test_a_wrong_optimizer_of_neuronx_distributed_is_refused(
    nxd: Path, nxd_config: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    """Its moments, or their number of updates, would be another training's."""
    alter(nxd, 1, change)
    done = forked("stages.merge", nxd, tmp_path / "out", "--config", nxd_config, "--with-optimizer")
    assert_one_line_error(done, *words)


def test_inconsistent_splits_are_refused(nxd: Path, nxd_config: Path, tmp_path: Path) -> None:
    """Query whole on both ranks, key and value split: each fits the model, but no layer can compute with them."""
    for rank in (0, 1):
        alter(nxd, rank, in_model(QUERY, lambda t: torch.zeros(64, 64)))
    done = forked("stages.merge", nxd, tmp_path / "out", "--config", nxd_config)
    assert_one_line_error(done, QUERY, "is whole on every rank", "is split")


def test_without_a_config_what_no_shape_says_is_not_guessed(nxd: Path, tmp_path: Path) -> None:
    done = forked("stages.merge", nxd, tmp_path / "out")
    assert_one_line_error(done, "intermediate.dense.weight of 128 rows on each of 2 ranks", "give --config")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_of_neuronx_distributed_is_found(nxd: Path, nxd_config: Path, tmp_path: Path, rank: int) -> None:
    shutil.rmtree(nxd / f"tp_rank_{rank:02}_pp_rank_00")
    done = forked("stages.merge", nxd, tmp_path / "out", "--config", nxd_config)
    assert_one_line_error(done, *(["rank 0"] if rank == 0 else ["share of 2 ranks: are shards missing?"]))


def test_models_that_split_more_and_less_are_found_by_their_shapes(tmp_path: Path) -> None:
    """Everything is split but the decoder's bias, as neuronx-distributed's may be; padded where it does not divide."""
    state = snapshot(optimizer=False)
    half = 102  # of 203 rows, one of them padding
    for rank in (0, 1):
        model = {}
        for name, tensor in state.model.items():
            if name == EMBEDDINGS:
                padded = torch.cat([tensor, torch.full((1, 32), 7.0)])
                model[name] = model["cls.predictions.decoder.weight"] = padded[rank * half : (rank + 1) * half].clone()
            elif re.fullmatch(r"bert\.encoder\..*output\.dense\.weight", name):
                model[name] = tensor.chunk(2, dim=1)[rank].clone()
            elif ".self." in name or "intermediate" in name:
                model[name] = tensor.chunk(2, dim=0)[rank].clone()
            else:
                model[name] = tensor
        model["cls.predictions.decoder.bias"] = state.model["cls.predictions.bias"]
        path = tmp_path / "nxd" / f"tp_rank_{rank:02}_pp_rank_00" / "checkpoint.pt"
        path.parent.mkdir(parents=True)
        torch.save({"model": model, "global_step": 5}, path)
    found = merged(tmp_path / "nxd", tmp_path / "out", "--config", write_config(tmp_path / "config.json"))
    tensors = load_file(found / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.model.items())


def test_a_directory_that_is_not_empty_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    done = forked("stages.merge", write_native(tmp_path, snapshot()), tmp_path / "out")
    assert_one_line_error(done, "is not empty and was not made by this stage")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_too_little_space_is_said_before_anything_is_written(disk: Disk, tmp_path: Path) -> None:
    disk.resize(1100)
    source = write_native(tmp_path, snapshot())
    done = forked("stages.merge", source, disk.path / "out", "--with-optimizer")
    assert_one_line_error(done, "the model needs", "are free there; make space")
    assert {path.name for path in (disk.path / "out").iterdir()} <= {"lock", "stage.json"}


def test_options_that_cannot_be_met_are_one_line(tmp_path: Path) -> None:
    source = write_native(tmp_path, snapshot(optimizer=False))
    done = forked("stages.merge", source, tmp_path / "a", "--with-optimizer")
    assert_one_line_error(done, "has no optimizer state to keep")
    done = forked("stages.merge", source, tmp_path / "b", "--max-shard-size", "big")
    assert_one_line_error(done, "--max-shard-size: big is not a size such as 500M")
    other = write_config(tmp_path / "config.json", ModelConfig.preset("tiny", vocab_size=CONFIG.vocab_size))
    done = forked("stages.merge", source, tmp_path / "c", "--config", other)
    assert_one_line_error(done, "holds another model", "hidden_size is 32, not 128")


@pytest.mark.parametrize("size", [2, 4])
def test_tensors_that_are_read_in_many_pieces_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Pieces of a few rows, which end within a rank's share or span two shares: like those of large models."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    state = snapshot()
    split = write_native(tmp_path, state, size)
    with opened(split, None, optimizer=True) as source:
        for kind, expected in (("model", state.model), ("optimizer", state.optimizer)):
            found: dict[str, list[Tensor]] = {}
            for chunk in source.stream(kind):
                found.setdefault(chunk.name, []).append(chunk.rows.clone())
            assert len(found[EMBEDDINGS if kind == "model" else f"exp_avg.{EMBEDDINGS}"]) > 10
            for name, pieces in found.items():
                assert torch.equal(torch.cat(pieces), expected[name]), name
            assert found.keys() == expected.keys()


def test_a_second_attempt_replaces_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """After a hang the runner starts the command again in a directory that is still locked: nothing is swept before."""
    source = Secret.address(str(write_native(tmp_path, snapshot())))
    merging, converting = MergeOptions(source=source), ConvertOptions(source=source)
    with StageDirectory.begin(tmp_path / "merged", merging.identity) as work:
        leave_half_a_file(work.path / "model.tmp")
        merge(work, merging)
    with StageDirectory.begin(tmp_path / "converted", converting.identity) as work:
        leave_half_a_file(work.path / "checkpoint.tmp")
        convert(work, converting)
    for made in (tmp_path / "merged" / "model", tmp_path / "converted" / "checkpoint"):
        assert made.is_dir()
        assert not (made / "half").exists()
        assert not list(made.parent.glob("*.tmp"))


def leave_half_a_file(directory: Path) -> None:
    directory.mkdir()
    (directory / "half").write_text("hal")


def test_the_tokenizer_is_the_models(tmp_path: Path) -> None:
    """It cuts texts at as many tokens as the model takes; one with more pieces than the model is refused."""
    from transformers import BertTokenizerFast

    model, tokenizer = write_native(tmp_path, snapshot()), tmp_path / "tokenizer"
    tokenizer.mkdir()
    words = [f"word{number}" for number in range(CONFIG.vocab_size)]
    vocabularies = {
        "small": [*SPECIAL_TOKENS, *words[: CONFIG.vocab_size - len(SPECIAL_TOKENS)]],
        "large": [*SPECIAL_TOKENS, *words],
    }
    save_tokenizer(tokenizer, vocabularies["large"], lower_case=True)
    done = forked("stages.merge", model, tmp_path / "out", "--tokenizer", tokenizer)
    assert_one_line_error(done, f"tokenizer.json has {CONFIG.vocab_size + len(SPECIAL_TOKENS)} pieces, the model 203")
    save_tokenizer(tokenizer, vocabularies["small"], lower_case=True)
    (tmp_path / "vocab.txt").write_text("\n".join(vocabularies["small"]))
    for name, given in (("--tokenizer", tokenizer), ("--vocab-file", tmp_path / "vocab.txt")):
        made = merged(model, tmp_path / f"out{name}", name, given)
        loaded = BertTokenizerFast.from_pretrained(made)
        assert (loaded.model_max_length, len(loaded)) == (CONFIG.max_position_embeddings, CONFIG.vocab_size)
        assert len(loaded("word1 " * 1000, truncation=True)["input_ids"]) == CONFIG.max_position_embeddings


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_vocabulary_that_is_not_the_one_the_stage_was_claimed_with_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Luigi hashes it when it starts, and the model is merged days later."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, "day", "night"]))
    options = MergeOptions(source=Secret.address(str(write_native(tmp_path, snapshot()))), vocab_file=path)

    def read_and_change(path: Path, *, pads: bool = True) -> list[str]:
        pieces = read_vocabulary(path, pads=pads)
        path.write_text("\n".join([*pieces, "year"]))
        return pieces

    with StageDirectory.begin(tmp_path / "out", options.identity) as work:
        if when == "before":
            read_and_change(path)
        else:
            monkeypatch.setattr("trainer.data.vocabulary.read_vocabulary", read_and_change)
        with pytest.raises(UserError, match="vocab.txt was changed while it was in use"):
            merge(work, options)
    assert not (tmp_path / "out" / "model").exists()
