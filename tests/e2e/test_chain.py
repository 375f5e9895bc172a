"""The whole chain through the real luigi: what it leaves, what a rerun does, how it fails."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.helpers.chain import LUIGI, STAGES, Chain, write_corpus
from tests.helpers.support import command, metrics, tensors


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = Chain(tmp_path_factory.mktemp("chain"))
    done = chain.run("BertPhase2")
    for part in ("phase 1: 8 steps", "phase 2: 4 steps", "masked-LM accuracy", "model: ", "next: "):
        assert part in done.stderr
    return chain


def test_every_stage_leaves_its_manifest_and_link(chain: Chain) -> None:
    assert sorted(path.name for path in (chain.work / "latest").iterdir()) == sorted(STAGES)
    for stage in STAGES:
        directory, manifest = chain.latest(stage), chain.manifest(stage)
        fingerprint = str(manifest["fingerprint"])
        assert directory.name == f"{stage}-{fingerprint[:10]}"
        outputs = manifest["outputs"]
        assert isinstance(outputs, list)
        assert outputs
        for output in outputs:
            assert (directory / output["path"]).stat().st_size == output["bytes"]
        keys = "stage phase fingerprint inputs parameters upstream outputs counts started seconds versions"
        assert set(keys.split()) <= set(manifest)
        assert (directory / "stage.log").exists()


@pytest.mark.filterwarnings("ignore:`clean_up_tokenization_spaces`:FutureWarning")  # transformers 4.44
def test_hugging_face_loads_the_model_and_its_tokenizer(chain: Chain) -> None:
    transformers = pytest.importorskip("transformers")
    directory = chain.latest("merge_shards") / "model"
    model, info = transformers.BertForPreTraining.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    trained = tensors(chain.latest("pretrain-phase2") / "checkpoints" / "ckpt_12")
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), trained[name], err_msg=name)
    tokenizer = transformers.BertTokenizerFast.from_pretrained(directory)
    ids = tokenizer("The people of the school", "A problem.")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "[CLS]"
    assert len(tokenizer) == model.config.vocab_size


def test_the_evaluation_is_hugging_faces_own(chain: Chain) -> None:
    """Losses and accuracies of the held-out shard, computed with Hugging Face's model and the full head."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForPreTraining.from_pretrained(chain.latest("merge_shards") / "model").eval()
    (path,) = chain.latest("shard_dataset-phase2").glob("*_test_*.hdf5")
    with h5py.File(path) as file:
        data = {key: torch.from_numpy(np.asarray(file[key][:], np.int64)) for key in file}
    labels = torch.full_like(data["input_ids"], -100)
    for row, (positions, ids) in enumerate(zip(data["masked_lm_positions"], data["masked_lm_ids"], strict=True)):
        labels[row, positions[positions > 0]] = ids[positions > 0]
    with torch.inference_mode():
        out = model(input_ids=data["input_ids"], attention_mask=data["input_mask"], token_type_ids=data["segment_ids"])
    masked = labels != -100
    words, pairs = out.prediction_logits[masked], out.seq_relationship_logits
    counts = chain.manifest("evaluate")["counts"]
    assert isinstance(counts, dict)
    assert (counts["samples"], counts["masked_tokens"]) == (len(labels), int(masked.sum()))
    loss = torch.nn.functional.cross_entropy(words, labels[masked]).item()
    assert counts["masked_lm_loss"] == pytest.approx(loss, rel=1e-4)  # fp32, other kernels
    accuracies = {
        "next_sentence_accuracy": (pairs.argmax(-1) == data["next_sentence_labels"]).float().mean().item(),
        "masked_lm_accuracy": (words.argmax(-1) == labels[masked]).float().mean().item(),
    }
    for name, accuracy in accuracies.items():
        assert counts[name] == pytest.approx(accuracy), name
    assert baseline_of(chain, labels[masked].tolist()) == pytest.approx(
        (counts["unigram_loss"], counts["unigram_accuracy"])
    )
    assert f"always guessing by frequency: {counts['unigram_loss']:.2f}" in chain.run("BertPhase2").stderr


def baseline_of(chain: Chain, labels: list[int]) -> tuple[float, float]:
    """Loss and accuracy of guessing `labels` by their frequencies in phase 2's training text, each count plus one."""
    pieces = (chain.latest("merge_shards") / "model" / "vocab.txt").read_text().splitlines()
    words: Counter[int] = Counter()
    for path in chain.latest("shard_dataset-phase2").glob("*_training_*.hdf5"):
        with h5py.File(path) as file:
            words.update(file["input_ids"][:][file["input_mask"][:] > 0].tolist())
    for special in ("[CLS]", "[SEP]"):
        del words[pieces.index(special)]
    total = words.total() + len(pieces)
    loss = -sum(math.log((words[label] + 1) / total) for label in labels) / len(labels)
    return loss, labels.count(max(sorted(words), key=lambda piece: words[piece])) / len(labels)


def test_blimp_is_scored_where_the_settings_name_a_copy(chain: Chain, tmp_path: Path) -> None:
    """Only Evaluate and Report run again."""
    folder = tmp_path / "blimp"
    folder.mkdir()
    pairs = [
        {"sentence_good": f"A {word} of the people.", "sentence_bad": f"The a {word} people."}
        for word in ("day", "man")
    ]
    (folder / "order.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    copy = chain.copy(tmp_path / "copy")
    done = copy.run("BertPhase2", "--Evaluation-blimp", str(folder))
    assert [line.split(":")[0] for line in done.stderr.splitlines() if ": started in " in line] == [
        "evaluate",
        "report",
    ]
    counts = copy.manifest("evaluate")["counts"]
    assert isinstance(counts, dict)
    assert counts["blimp_accuracy_by_set"] == {"order": counts["blimp_accuracy"]}
    assert f"BLiMP: {counts['blimp_accuracy']:.1%} of 2 pairs" in done.stderr
    assert "BLiMP" in (copy.latest("report") / "report.html").read_text()


def test_phase_2_counts_on_from_phase_1(chain: Chain) -> None:
    assert [record["step"] for record in metrics(chain.latest("pretrain-phase1"))] == list(range(1, 9))
    assert [record["step"] for record in metrics(chain.latest("pretrain-phase2"))] == list(range(9, 13))
    state = json.loads((chain.latest("convert_checkpoint") / "checkpoint" / "state.json").read_text())
    assert (state["phase"], state["global_step"]) == (1, 8)


def test_a_rerun_runs_nothing_and_imports_no_torch(chain: Chain) -> None:
    done = chain.without_torch(
        "from luigi.cmdline import luigi_run\n"
        "try: luigi_run(['--module', 'pipeline', 'BertPhase2'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
    )
    assert "started" not in done.stderr
    assert "BERT is pretrained." in done.stderr


def test_a_rerun_starts_at_the_first_stage_that_is_not_complete(chain: Chain) -> None:
    before = (chain.latest("merge_shards") / "model" / "model.safetensors").read_bytes()
    (chain.latest("merge_shards") / "manifest.json").unlink()
    shutil.rmtree(chain.latest("merge_shards") / "model")
    done = chain.run("BertPhase2")
    assert [line.split(":")[0] for line in done.stderr.splitlines() if ": started in " in line] == [
        "merge_shards",
        "report",  # the model card was deleted with the model
    ]
    assert (chain.latest("merge_shards") / "model" / "model.safetensors").read_bytes() == before


def test_training_goes_on_from_its_last_checkpoint(chain: Chain) -> None:
    directory = chain.latest("pretrain-phase1")
    before = tensors(directory / "checkpoints" / "ckpt_8")
    (directory / "manifest.json").unlink()
    shutil.rmtree(directory / "checkpoints" / "ckpt_8")
    done = chain.run("Pretrain", "--phase", "1")
    assert "resuming from checkpoint" in done.stderr
    assert "ckpt_6 at step 6" in done.stderr
    after = tensors(directory / "checkpoints" / "ckpt_8")
    for name, tensor in before.items():
        assert after[name].tobytes() == tensor.tobytes(), name


def test_a_phase_2_setting_keeps_the_data_and_phase_1(chain: Chain) -> None:
    done = chain.run("BertPhase2", "--Phase2-lr", "1e-4")
    started = [line.split(":")[0] for line in done.stderr.splitlines() if ": started in " in line]
    assert started == ["pretrain-phase2", "merge_shards", "evaluate", "report"]
    assert "started" not in chain.run("BertPhase2").stderr


def test_two_workers_make_the_same_model_up_to_rounding(chain: Chain, tmp_path: Path) -> None:
    """Through luigi and torchrun; the micro-batches are the same, so dropout is too."""
    shutil.copytree(chain.work, tmp_path / "work", symlinks=True)
    shutil.rmtree(tmp_path / "work" / chain.latest("pretrain-phase1").name)
    words = ("Pretrain", "--phase", "1", "--Run-work-dir", str(tmp_path / "work"), "--Cluster-nproc-per-node", "2")
    done = chain.run(*words)
    assert "2 worker(s)" in done.stderr
    one, two = (
        metrics(work / chain.latest("pretrain-phase1").name) for work in (chain.work, tmp_path / "work")
    )  # fmt: skip
    # bf16 or fp32 sums in another order, over 8 steps.
    np.testing.assert_allclose([r["loss"] for r in two], [r["loss"] for r in one], rtol=1e-3)


def test_a_stage_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(b"A sentence.\n\xff\xfe broken\n")
    done = chain.run("BertPhase2", status=30)
    assert_one_line_errors_agree(done.stdout + done.stderr, "corpus.txt")


def assert_one_line_errors_agree(output: str, *fragments: str, count: int = 2) -> None:
    """The stage's own line, and luigi's with the path of the log; no traceback."""
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.lower().startswith("error: ")]
    assert len(errors) == count, output
    for fragment in fragments:
        assert all(fragment in line for line in errors), errors


def test_a_corpus_too_small_for_a_batch_is_refused(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    write_corpus(tmp_path / "corpus.txt", documents=4)
    done = chain.run("Pretrain", "--phase", "1", "--Phase1-global-batch-size", "4096", status=30)
    assert_one_line_errors_agree(done.stdout + done.stderr, "fewer than one global batch of 4096")


def test_a_work_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    (tmp_path / "work").write_text("a file is in the way")
    done = command(*LUIGI, "TokenizeCorpus", env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert done.returncode == 30
    assert_one_line_errors_agree(done.stdout + done.stderr, str(tmp_path / "work"), count=1)


@pytest.mark.slow
def test_a_model_shared_by_two_workers_is_the_same_model(chain: Chain, tmp_path: Path) -> None:
    """Same settings, but the model is split: merged, it equals that of one worker, up to rounding."""
    shared = Chain(tmp_path)
    (tmp_path / "corpus.txt").write_bytes((chain.directory / "corpus.txt").read_bytes())
    no_dropout = ("--Model-hidden-dropout-prob", "0", "--Model-attention-probs-dropout-prob", "0")
    given = (*no_dropout, "--Precision-mode", "fp64")
    shared.run("BertPhase2", "--Cluster-nproc-per-node", "2", "--Cluster-tensor-parallel-size", "2", *given)
    (tmp_path / "alone").mkdir()
    alone = Chain(tmp_path / "alone")
    (alone.directory / "corpus.txt").write_bytes((chain.directory / "corpus.txt").read_bytes())
    alone.run("BertPhase2", *given)
    ours, theirs = (tensors(c.latest("merge_shards") / "model") for c in (shared, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=1e-6, atol=1e-10, err_msg=name)
    names = {path.name for path in (shared.latest("pretrain-phase2") / "checkpoints" / "ckpt_12").iterdir()}
    assert {"model-00-of-02.safetensors", "optimizer-01-of-02.safetensors"} <= names
