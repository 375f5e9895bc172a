"""Every setting changes the fingerprints of exactly the stages whose results depend on it, and of no others.

What depends on what is written down here by hand, independently of the code under test.
"""

from __future__ import annotations

import configparser
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import luigi
import pytest
from luigi.configuration import get_config

from common.errors import UserError
from common.files import sha256_of
from pipeline.settings import sections
from pipeline.settings.load import load
from pipeline.tasks.bert import BertPhase2, Pretrain
from pipeline.tasks.mnist import MnistMlp
from pipeline.tasks.stage import Stage
from tests.helpers.support import ROOT

Fingerprints = Callable[..., dict[str, str]]

#: What each stage is made from. Of the data, graphs hold only the size of its vocabulary. Training is not made from
#: what Precompile makes: that only saves time.
MADE_FROM = {
    "tokenize_corpus": (),
    "download_dataset-phase1": (),
    "download_dataset-phase2": (),
    "shard_dataset-phase1": ("tokenize_corpus",),
    "shard_dataset-phase2": ("tokenize_corpus",),
    "precompile-phase1": ("tokenize_corpus",),
    "precompile-phase2": ("tokenize_corpus",),
    "embed_words": ("shard_dataset-phase1", "download_dataset-phase1"),
    "pretrain-phase1": ("shard_dataset-phase1", "download_dataset-phase1", "embed_words"),
    "convert_checkpoint": ("pretrain-phase1",),
    "pretrain-phase2": ("shard_dataset-phase2", "download_dataset-phase2", "convert_checkpoint"),
    "merge_shards": ("pretrain-phase2",),
    "evaluate": ("merge_shards", "shard_dataset-phase2", "download_dataset-phase2"),
    "report": ("merge_shards", "evaluate"),
    "download_mnist": (),
    "train_mlp": ("download_mnist",),
    "evaluate_mlp": ("train_mlp", "download_mnist"),
}

NOTHING: tuple[str, ...] = ()
TOKENS = ("tokenize_corpus",)
SHARDS = ("shard_dataset-phase1", "shard_dataset-phase2")
COMPILED = ("precompile-phase1", "precompile-phase2")
TRAINED = ("pretrain-phase1", "pretrain-phase2")
MLP = ("train_mlp",)
MODEL = (*COMPILED, *TRAINED)

#: Section, key, a value other than the default, and the stages that the setting affects directly;
#: what is made from those changes too. `{tmp}` is the directory that `fingerprints` fills.
CASES: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("run", "work_dir", "{tmp}/elsewhere", NOTHING),
    ("run", "seed", "7", (*TOKENS, *SHARDS, *TRAINED, *MLP, "embed_words")),
    ("run", "log_interval", "3", NOTHING),
    ("run", "non_finite", "stop", NOTHING),
    ("run", "non_finite_limit", "5", NOTHING),
    ("run", "replica_check_steps", "7", NOTHING),
    ("run", "console", "quiet", NOTHING),
    ("run", "processes", "5", NOTHING),
    ("run", "report_interval_s", "5", NOTHING),
    ("run", "stage_hang_timeout_s", "5", NOTHING),
    ("corpus", "source", "{tmp}/a.txt", TOKENS),
    ("corpus", "held_out_source", "{tmp}/b.txt", TOKENS),
    ("corpus", "held_out", "0.25", TOKENS),
    ("corpus", "vocab_file", "{tmp}/vocab.txt", TOKENS),
    ("corpus", "vocab_size", "4096", TOKENS),
    ("corpus", "lower_case", "false", TOKENS),
    # The built-in text has its own documents.
    ("corpus", "document", "file", NOTHING),
    ("corpus", "max_unknown_share", "0.5", NOTHING),
    # These are about an archive, and by default there is none (see below).
    ("dataset", "phase1_sha256", "0" * 64, NOTHING),
    ("dataset", "phase2_sha256", "0" * 64, NOTHING),
    ("dataset", "s3_profile", "reader", NOTHING),
    ("dataset", "s3_endpoint", "http://localhost:9000", NOTHING),
    ("dataset", "low_speed_limit_bytes_per_s", "5", NOTHING),
    ("dataset", "low_speed_time_s", "5", NOTHING),
    ("dataset", "connections", "3", NOTHING),
    ("dataset", "keep_archive", "true", NOTHING),
    ("dataset", "next_sentence", "false", (*SHARDS, *MODEL)),
    ("dataset", "dupe_factor", "4", SHARDS),
    ("dataset", "short_seq_prob", "0.2", SHARDS),
    ("dataset", "whole_word_mask", "true", TRAINED),
    ("dataset", "shards", "5", SHARDS),
    ("model", "preset", "mini", (*MODEL, "embed_words")),
    ("model", "vocab_size", "9000", MODEL),
    ("model", "num_hidden_layers", "3", MODEL),
    ("model", "hidden_size", "256", (*MODEL, "embed_words")),
    ("model", "num_attention_heads", "4", MODEL),
    ("model", "intermediate_size", "256", MODEL),
    ("model", "max_position_embeddings", "1024", MODEL),
    ("model", "hidden_dropout_prob", "0.2", MODEL),
    ("model", "attention_probs_dropout_prob", "0.2", MODEL),
    ("phase1", "seq_len", "64", ("shard_dataset-phase1", "precompile-phase1", "pretrain-phase1")),
    # For held-out examples, and for static masks.
    ("phase1", "max_pred_len", "10", ("shard_dataset-phase1",)),
    ("phase1", "masked_lm_prob", "0.4", ("precompile-phase1", "pretrain-phase1")),
    ("phase1", "final_masked_lm_prob", "0.4", ("precompile-phase1", "pretrain-phase1")),
    ("phase1", "final_masked_lm_prob", "0.1", ("pretrain-phase1",)),
    ("phase1", "sampled_softmax", "300", ("precompile-phase1", "pretrain-phase1")),
    ("phase1", "next_sentence_weight", "0.5", ("pretrain-phase1",)),
    ("phase1", "pack", "true", ("shard_dataset-phase1", "precompile-phase1")),
    ("phase1", "global_batch_size", "128", ("pretrain-phase1",)),
    # Without micro-steps to accumulate, the graph is a different one.
    ("phase1", "global_batch_size", "16", ("precompile-phase1", "pretrain-phase1")),
    ("phase1", "micro_batch_size", "8", ("precompile-phase1",)),
    ("phase1", "optimizer", "AdamW_FP32OptimParams", ("precompile-phase1", "pretrain-phase1")),
    ("phase1", "lr", "5e-4", ("pretrain-phase1",)),
    ("phase1", "adamw_lr_ratio", "0.5", ("pretrain-phase1",)),
    ("phase1", "schedule", "cosine", ("pretrain-phase1",)),
    ("phase1", "batch_ramp_steps", "10", ("pretrain-phase1",)),
    ("phase1", "batch_ramp_parts", "4", ("pretrain-phase1",)),
    ("phase1", "decay_share", "0.5", ("pretrain-phase1",)),
    ("phase1", "warmup_steps", "60", ("pretrain-phase1",)),
    ("phase1", "max_steps", "600", ("pretrain-phase1",)),
    ("phase1", "budget", "20m", ("pretrain-phase1",)),
    ("phase1", "weight_decay", "0.1", ("pretrain-phase1",)),
    ("phase1", "max_grad_norm", "2", ("pretrain-phase1",)),
    ("phase1", "max_grad_norm", "0", ("precompile-phase1", "pretrain-phase1")),
    ("phase1", "ckpt_interval_steps", "7", NOTHING),
    ("phase1", "ckpt_interval_minutes", "7", NOTHING),
    ("phase1", "num_ckpts_to_keep", "7", NOTHING),
    ("phase1", "minimal_ckpt", "true", NOTHING),
    ("phase1", "word_embeddings", "random", ("pretrain-phase1",)),
    ("phase1", "initial_attention", "random", ("pretrain-phase1",)),
    ("phase2", "new_positions", "initial", ("pretrain-phase2",)),
    # Phase 1 is then left out, and the settings define the model.
    ("phase2", "start_from", "{tmp}/ckpt_5.pt", ("convert_checkpoint",)),
    ("phase2", "seq_len", "256", ("shard_dataset-phase2", "precompile-phase2", "pretrain-phase2")),
    ("phase2", "max_pred_len", "40", ("shard_dataset-phase2", "evaluate")),
    ("phase2", "masked_lm_prob", "0.3", ("precompile-phase2", "pretrain-phase2")),
    ("phase2", "final_masked_lm_prob", "0.1", ("pretrain-phase2",)),
    ("phase2", "sampled_softmax", "300", ("precompile-phase2", "pretrain-phase2")),
    ("phase2", "next_sentence_weight", "0.5", ("pretrain-phase2",)),
    ("phase2", "pack", "false", ("shard_dataset-phase2", "precompile-phase2")),
    ("phase2", "global_batch_size", "64", ("pretrain-phase2",)),
    ("phase2", "micro_batch_size", "4", ("precompile-phase2",)),
    ("phase2", "optimizer", "AdamW_FP32OptimParams", ("precompile-phase2", "pretrain-phase2")),
    ("phase2", "lr", "1e-4", ("pretrain-phase2",)),
    ("phase2", "adamw_lr_ratio", "0.5", ("pretrain-phase2",)),
    ("phase2", "schedule", "cosine", ("pretrain-phase2",)),
    ("phase2", "batch_ramp_steps", "10", ("pretrain-phase2",)),
    ("phase2", "batch_ramp_parts", "4", ("pretrain-phase2",)),
    ("phase2", "decay_share", "0.5", ("pretrain-phase2",)),
    ("phase2", "warmup_steps", "20", ("pretrain-phase2",)),
    ("phase2", "max_steps", "200", ("pretrain-phase2",)),
    ("phase2", "budget", "20m", ("pretrain-phase2",)),
    ("phase2", "weight_decay", "0.1", ("pretrain-phase2",)),
    ("phase2", "max_grad_norm", "2", ("pretrain-phase2",)),
    ("phase2", "max_grad_norm", "0", ("precompile-phase2", "pretrain-phase2")),
    ("phase2", "ckpt_interval_steps", "7", NOTHING),
    ("phase2", "ckpt_interval_minutes", "7", NOTHING),
    ("phase2", "num_ckpts_to_keep", "7", NOTHING),
    ("phase2", "minimal_ckpt", "true", NOTHING),
    ("precision", "mode", "fp32", MODEL),
    ("precision", "grad_reduce_in_bf16", "true", MODEL),
    # Graphs are specific to a device and a layout; what is trained is not.
    ("cluster", "spot_watch", "true", NOTHING),
    ("cluster", "self_test", "false", NOTHING),
    ("cluster", "allow_fallbacks", "aten::gelu", NOTHING),
    # What a night takes over from an earlier one: its checkpoint, held-out shards, and documents not to train on.
    ("run", "start_from", "{tmp}/parent", ("pretrain-phase1", "evaluate", *TOKENS)),
    ("nights", "start_from", "previous", NOTHING),
    ("nights", "gate_tolerance", "0.1", NOTHING),
    ("nights", "keep", "3", NOTHING),
    ("nights", "webhook", "http://localhost:9000", NOTHING),
    ("cluster", "device", "cuda", COMPILED),
    # For the MLP, every worker has a batch of its own, and the learning rate grows with the number of workers.
    ("cluster", "nproc_per_node", "2", (*COMPILED, *MLP)),
    # Where it runs does not change what is made.
    ("cluster", "launcher", "slurm", NOTHING),
    ("cluster", "master_addr", "10.0.0.1", NOTHING),
    ("cluster", "master_port", "2040", NOTHING),
    ("cluster", "join_timeout_s", "60", NOTHING),
    ("slurm", "partition", "debug", NOTHING),
    ("slurm", "account", "me", NOTHING),
    ("slurm", "time_limit", "60", NOTHING),
    ("slurm", "signal_s", "60", NOTHING),
    ("slurm", "sbatch_lines", "--mem=0", NOTHING),
    ("kubernetes", "gang", "jobset", NOTHING),
    ("kubernetes", "queue", "team", NOTHING),
    ("kubernetes", "image", "trainer:1", NOTHING),
    ("kubernetes", "namespace", "me", NOTHING),
    ("kubernetes", "volume_claim", "fsx", NOTHING),
    ("kubernetes", "mount_path", "/fsx", NOTHING),
    ("kubernetes", "pod_resources", "nvidia.com/gpu=8", NOTHING),
    ("kubernetes", "node_selector", "a=b", NOTHING),
    ("kubernetes", "service_account", "trainer", NOTHING),
    ("kubernetes", "start_timeout_s", "60", NOTHING),
    ("cluster", "data_parallel", "ddp", COMPILED),
    ("cluster", "shard_optimizer", "true", NOTHING),
    ("cluster", "batches_per_execution", "2", COMPILED),
    ("cluster", "compile", "true", COMPILED),
    ("cluster", "collective_timeout_s", "60", NOTHING),
    ("cluster", "hang_timeout_s", "60", NOTHING),
    ("evaluation", "max_samples", "100", ("evaluate",)),
    ("evaluation", "blimp", "{tmp}/a.txt", ("evaluate",)),
    # For BLiMP, which is not scored by default.
    ("evaluation", "blimp_samples", "100", NOTHING),
    ("card", "license", "mit", NOTHING),
    ("card", "language", "de", NOTHING),
    ("card", "datasets", "wikimedia/wikipedia", NOTHING),
    ("store", "url", "{tmp}/store", NOTHING),
    ("store", "push", "none", NOTHING),
    ("store", "pull", "shards", NOTHING),
    ("store", "s3_profile", "writer", NOTHING),
    ("store", "s3_endpoint", "http://localhost:9000", NOTHING),
    ("store", "connections", "3", NOTHING),
    # For a store in S3, and by default there is none.
    ("store", "encryption", "AES256", NOTHING),
    ("store", "kms_key", "", NOTHING),
    ("store", "lease_s", "5", NOTHING),
    ("trackers", "names", "", NOTHING),
    ("trackers", "project", "another", NOTHING),
    ("trackers", "mlflow_uri", "http://localhost:5000", NOTHING),
    ("trackers", "wandb_mode", "offline", NOTHING),
    ("trackers", "wait_s", "5", NOTHING),
    ("mnist", "url", "s3://no-bucket/mnist", ("download_mnist",)),
    ("mnist", "checksums", "none", ("download_mnist",)),
    ("mnist", "epochs", "5", MLP),
    ("mnist", "batch_size", "64", MLP),
    ("mnist", "lr", "0.01", MLP),
    ("mnist", "precision", "autocast", MLP),
    ("mnist", "ckpt_interval_steps", "7", NOTHING),
    ("mnist", "log_interval", "7", NOTHING),
]

#: Settings with one allowed value, and a value that is refused: once it is allowed, the setting needs a case above.
ONE_VALUE = [
    ("cluster", "tensor_parallel_size", "2"),
    ("cluster", "nnodes", "2"),
    ("cluster", "build_nodes", "2"),
    ("cluster", "node_rank", "1"),
    ("dataset", "masking", "static"),  # with the default shares to mask
]


def changed_by(direct: tuple[str, ...]) -> set[str]:
    """`direct` and all that is made from it."""
    changed = set(direct)
    for stage, upstream in MADE_FROM.items():  # listed upstream first
        if changed & set(upstream):
            changed.add(stage)
    return changed


def defaults() -> list[tuple[str, str, str]]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "luigi.cfg")
    ours = [sections.section_name(section) for section in sections.SECTIONS]
    return [(section, key, value) for section in ours for key, value in parser.items(section)]


@pytest.fixture
def fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fingerprints]:
    """The fingerprint of every stage of the chain, with the settings of luigi.cfg and the changes given."""
    monkeypatch.delenv("LUIGI_CONFIG_PATH", raising=False)
    for name, text in (("a.txt", "A text."), ("b.txt", "Another text."), ("vocab.txt", "[PAD]\n[UNK]\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "ckpt_5.pt").write_bytes(b"a checkpoint")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "x_training_0.hdf5").write_bytes(b"a shard")
    write_parent(tmp_path / "parent")
    config = get_config()
    before = [(section, key, config.get(section, key)) for section, key, _ in defaults()]

    def compute(*changes: tuple[str, str, str]) -> dict[str, str]:
        for section, key, value in (*defaults(), ("run", "work_dir", "{tmp}/work"), *changes):
            config.set(section, key, value.replace("{tmp}", str(tmp_path)).replace("%", "%%"))
        forget()
        found: dict[str, str] = {}

        def visit(task: luigi.Task) -> None:
            if isinstance(task, Stage):
                assert found.setdefault(task.label, task.identity.fingerprint) == task.identity.fingerprint
            for upstream in (task.requires() or {}).values():
                visit(upstream)

        visit(BertPhase2())
        visit(MnistMlp())
        return found

    yield compute
    for section, key, value in before:
        config.set(section, key, value)
    forget()


def write_parent(directory: Path) -> None:
    """What a night takes over from another, as far as it affects anything."""
    files = (
        "vocab.txt",
        "checkpoint/ckpt_5/manifest.json",
        "held_out/x_test_0.hdf5",
        "held_out_tokens/tokens_test_0.hdf5",
    )
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    hashes = {name: sha256_of(directory / name) for name in files}
    record = {"night": "2026-11-20", "checkpoint": "ckpt_5", "sha256": hashes}
    (directory / "parent.json").write_text(json.dumps(record))


def forget() -> None:
    """Settings and tasks are made once per process; after this they are made again."""
    load.cache_clear()
    luigi.Task.clear_instance_cache()


def difference(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Stages of the chain `after` that `before` would not have made."""
    return {stage for stage, fingerprint in after.items() if before.get(stage) != fingerprint}


def test_every_setting_has_its_line() -> None:
    """For each new setting, what depends on it has to be listed here."""
    known = {(section, key) for section, key, *_ in [*CASES, *ONE_VALUE, *DOWNLOADED]}
    assert known == {(sections.section_name(s), name) for s in sections.SECTIONS for name, _ in s.get_params()}


def test_a_ramp_of_the_batch_has_graphs_of_its_own_with_ddp(fingerprints: Fingerprints) -> None:
    """Which reduces in the last micro-step of a step; without it a longer step only repeats its micro-steps."""
    ddp, ramp = ("cluster", "data_parallel", "ddp"), ("phase1", "batch_ramp_steps", "10")
    direct = ("precompile-phase1", "pretrain-phase1")
    assert difference(fingerprints(ddp), fingerprints(ddp, ramp)) == changed_by(direct)


@pytest.mark.parametrize(("section", "key", "value", "direct"), CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_exactly_what_depends_on_a_setting_changes(
    fingerprints: Fingerprints, section: str, key: str, value: str, direct: tuple[str, ...]
) -> None:
    before = fingerprints()
    after = fingerprints((section, key, value))
    # A setting may remove a stage from the chain.
    assert difference(before, after) == changed_by(direct) & set(after)
    assert set(direct) <= set(after)
    assert fingerprints() == before


@pytest.mark.parametrize(
    ("section", "key", "value", "direct"),
    [
        ("phase1", "max_pred_len", "30", ("shard_dataset-phase1", "precompile-phase1", "pretrain-phase1")),
        ("phase1", "masked_lm_prob", "0.1", ("shard_dataset-phase1",)),
        ("dataset", "whole_word_mask", "true", SHARDS),
    ],
)
def test_static_masks_are_made_with_the_shards(
    fingerprints: Fingerprints, section: str, key: str, value: str, direct: tuple[str, ...]
) -> None:
    shares = (("phase1", "masked_lm_prob", "0.15"), ("phase1", "final_masked_lm_prob", ""))
    static = (*shares, ("dataset", "masking", "static"))
    assert difference(fingerprints(*static), fingerprints(*static, (section, key, value))) == changed_by(direct)
    # The maximum of masked positions in a row is lower than where rows are masked when they are read.
    assert difference(fingerprints(*shares), fingerprints(*static)) == changed_by((*SHARDS, "precompile-phase2"))


def test_whole_sentences_are_not_shortened(fingerprints: Fingerprints) -> None:
    off = ("dataset", "next_sentence", "false")
    assert fingerprints(off, ("dataset", "short_seq_prob", "0.2")) == fingerprints(off)


def test_without_a_next_sentence_loss_its_weight_decides_nothing(fingerprints: Fingerprints) -> None:
    off = ("dataset", "next_sentence", "false")
    assert fingerprints(off, ("phase1", "next_sentence_weight", "0.5")) == fingerprints(off)


def test_labels_of_downloaded_shards_can_be_ignored(fingerprints: Fingerprints) -> None:
    """The same shards are not fetched again."""
    changed = difference(fingerprints(*DOWNLOADED), fingerprints(*DOWNLOADED, ("dataset", "next_sentence", "false")))
    assert changed == changed_by(MODEL)


def test_how_the_model_is_shared_changes_graphs_alone(fingerprints: Fingerprints) -> None:
    workers = ("cluster", "nproc_per_node", "2")
    changed = difference(fingerprints(workers), fingerprints(workers, ("cluster", "tensor_parallel_size", "2")))
    assert changed == changed_by(COMPILED)


def test_the_number_of_nodes_changes_graphs_alone(fingerprints: Fingerprints) -> None:
    """Like the number of workers: for the MLP, each worker has a batch of its own."""
    slurm = ("cluster", "launcher", "slurm")
    changed = difference(fingerprints(slurm), fingerprints(slurm, ("cluster", "nnodes", "2")))
    assert changed == changed_by((*COMPILED, *MLP))
    by_hand = (("cluster", "nnodes", "2"), ("cluster", "master_addr", "10.0.0.1"))
    assert fingerprints(slurm, ("cluster", "nnodes", "2")) == fingerprints(*by_hand)
    assert fingerprints(*by_hand, ("cluster", "node_rank", "1")) == fingerprints(*by_hand)


def test_how_many_machines_make_the_data_changes_nothing(fingerprints: Fingerprints) -> None:
    slurm = ("cluster", "launcher", "slurm")
    assert fingerprints(slurm, ("cluster", "build_nodes", "2")) == fingerprints(slurm)


@pytest.mark.parametrize(("section", "key", "value"), ONE_VALUE)
def test_a_setting_with_one_value_cannot_be_changed(
    fingerprints: Fingerprints, section: str, key: str, value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fingerprints((section, key, value))
    assert f"[{section}] {key} = {value}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("instead", "key", "value"),
    [("vocab_file", "vocab_size", "4096"), ("held_out_source", "held_out", "0.25")],
)
def test_a_setting_that_another_one_replaces_changes_nothing(
    fingerprints: Fingerprints, instead: str, key: str, value: str
) -> None:
    replaced = ("corpus", instead, "{tmp}/vocab.txt" if instead == "vocab_file" else "{tmp}/b.txt")
    assert fingerprints(replaced) == fingerprints(replaced, ("corpus", key, value))


def test_what_ends_a_document_counts_for_plain_text_alone(fingerprints: Fingerprints, tmp_path: Path) -> None:
    document = ("corpus", "document", "file")
    text = ("corpus", "source", "{tmp}/a.txt")
    assert difference(fingerprints(text), fingerprints(text, document)) == changed_by(TOKENS)
    (tmp_path / "a.jsonl").write_text('{"text": "A text."}')
    json_lines = ("corpus", "source", "{tmp}/a.jsonl")
    assert fingerprints(json_lines) == fingerprints(json_lines, document)


def test_how_a_file_is_read_counts(fingerprints: Fingerprints, tmp_path: Path) -> None:
    """The same bytes are different documents when the file name says that they are JSON Lines."""
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.txt").read_bytes())
    before = fingerprints(("corpus", "source", "{tmp}/a.txt"))
    assert difference(before, fingerprints(("corpus", "source", "{tmp}/a.jsonl"))) == changed_by(TOKENS)


#: One of them alone is refused.
DOWNLOADED = (("dataset", "phase1_url", "{tmp}/shards"), ("dataset", "phase2_url", "{tmp}/shards"))


def test_downloaded_shards_take_the_place_of_the_corpus(fingerprints: Fingerprints) -> None:
    """They come without a vocabulary: graphs and training no longer take its size from the corpus."""
    after = fingerprints(*DOWNLOADED)
    direct = ("download_dataset-phase1", "download_dataset-phase2", *COMPILED)
    assert difference(fingerprints(), after) == changed_by(direct)
    assert not {*TOKENS, *SHARDS} & set(after)


@pytest.mark.parametrize("setting", DOWNLOADED, ids=lambda setting: setting[1])
def test_one_phase_downloaded_and_the_other_from_the_corpus_is_refused(
    fingerprints: Fingerprints, tmp_path: Path, setting: tuple[str, str, str]
) -> None:
    with pytest.raises(UserError, match=f"{setting[1]} is set and phase._url is empty: .* two vocabularies"):
        fingerprints(setting)
    # A phase that is not trained has no data.
    assert "download_dataset-phase1" not in fingerprints(STARTED, setting)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [case[:3] for case in CASES if case[3] in (TOKENS, SHARDS) and case[1] != "vocab_file"],
    ids=str,
)
def test_settings_of_text_change_nothing_for_downloaded_shards(
    fingerprints: Fingerprints, section: str, key: str, value: str
) -> None:
    assert fingerprints(*DOWNLOADED) == fingerprints(*DOWNLOADED, (section, key, value))


def test_the_vocabulary_of_downloaded_shards_goes_to_the_merged_model_alone(fingerprints: Fingerprints) -> None:
    """And then it matters whether the vocabulary is uncased."""
    given = (*DOWNLOADED, ("corpus", "vocab_file", "{tmp}/vocab.txt"))
    assert difference(fingerprints(*DOWNLOADED), fingerprints(*given)) == changed_by(("merge_shards",))
    cased = fingerprints(*given, ("corpus", "lower_case", "false"))
    assert difference(fingerprints(*given), cased) == changed_by(("merge_shards",))


def test_the_seed_decides_training_on_downloaded_shards_too(fingerprints: Fingerprints) -> None:
    """There, no corpus exists that would change with the seed."""
    changed = difference(fingerprints(*DOWNLOADED), fingerprints(*DOWNLOADED, ("run", "seed", "7")))
    assert changed == changed_by(("embed_words", *TRAINED, *MLP))


FROM_THE_NETWORK = (
    ("dataset", "phase1_url", "s3://no-bucket/1.tar"),
    ("dataset", "phase2_url", "https://no-host.invalid/2.tar"),
)


@pytest.mark.parametrize(
    ("key", "value", "direct"),
    [
        ("phase1_url", "s3://no-bucket/3.tar", ("download_dataset-phase1",)),
        ("phase2_url", "https://no-host.invalid/3.tar", ("download_dataset-phase2",)),
        ("phase1_sha256", "0" * 64, ("download_dataset-phase1",)),
        ("phase2_sha256", "0" * 64, ("download_dataset-phase2",)),
        ("s3_profile", "reader", NOTHING),
        ("s3_endpoint", "http://localhost:9000", NOTHING),
        ("connections", "3", NOTHING),
        ("keep_archive", "true", NOTHING),
    ],
)
def test_what_comes_from_the_network_is_known_by_its_address(
    fingerprints: Fingerprints, key: str, value: str, direct: tuple[str, ...]
) -> None:
    """None of these hosts exists: the network is not used."""
    before = fingerprints(*FROM_THE_NETWORK)
    assert difference(before, fingerprints(*FROM_THE_NETWORK, ("dataset", key, value))) == changed_by(direct)


def test_the_vocabulary_of_downloaded_shards_is_checked_anew(fingerprints: Fingerprints) -> None:
    changed = difference(fingerprints(*DOWNLOADED), fingerprints(*DOWNLOADED, ("model", "vocab_size", "9000")))
    assert changed == changed_by(("download_dataset-phase1", "download_dataset-phase2", *COMPILED))


def test_blimp_needs_the_vocabulary_of_downloaded_shards(fingerprints: Fingerprints) -> None:
    scored = (*DOWNLOADED, ("evaluation", "blimp", "{tmp}/a.txt"))
    with pytest.raises(UserError, match=r"\[evaluation\] blimp needs the model's tokenizer.*\[corpus\] vocab_file"):
        fingerprints(*scored)
    fingerprints(*scored, ("corpus", "vocab_file", "{tmp}/vocab.txt"))


def test_the_content_of_a_text_counts_and_its_name_does_not(fingerprints: Fingerprints, tmp_path: Path) -> None:
    source = ("corpus", "source", "{tmp}/a.txt")
    before = fingerprints(source)
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert fingerprints(("corpus", "source", "{tmp}/c.txt")) == before
    (tmp_path / "a.txt").write_text("A Text.")
    assert difference(before, fingerprints(source)) == changed_by(TOKENS)


def test_a_text_that_is_not_there_is_one_line(fingerprints: Fingerprints) -> None:
    with pytest.raises(UserError, match=r"no\.txt matches no file"):
        fingerprints(("corpus", "source", "{tmp}/no.txt"))


STARTED = ("phase2", "start_from", "{tmp}/ckpt_5.pt")


def test_a_checkpoint_to_start_from_takes_the_place_of_phase_1(fingerprints: Fingerprints, tmp_path: Path) -> None:
    started = fingerprints(STARTED)
    assert not {"pretrain-phase1", "precompile-phase1", "shard_dataset-phase1"} & set(started)
    after = {"convert_checkpoint", "pretrain-phase2", "merge_shards", "evaluate", "report"}
    (tmp_path / "ckpt_5.pt").write_bytes(b"another checkpoint")
    assert difference(started, fingerprints(STARTED)) == after
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ckpt_5.pt").rename(tmp_path / "elsewhere" / "ckpt_5.pt")
    moved = ("phase2", "start_from", "{tmp}/elsewhere/ckpt_5.pt")
    assert fingerprints(moved) == fingerprints(moved, ("phase1", "lr", "5e-4"), ("phase1", "max_steps", "600"))
    assert set(difference(fingerprints(moved), fingerprints(moved, ("model", "hidden_size", "256")))) >= after


def test_a_checkpoint_to_start_from_that_is_not_there_is_one_line(fingerprints: Fingerprints) -> None:
    with pytest.raises(UserError, match=r"no checkpoint .*ckpt_6\.pt"):
        fingerprints(("phase2", "start_from", "{tmp}/ckpt_6.pt"))


@pytest.mark.parametrize(
    ("schedule", "last", "says_how"),
    [("wsd", "0.15", True), ("constant", "0.15", True), ("wsd", "", False), ("linear", "0.15", False)],
)
def test_a_training_whose_masks_fall_in_the_decay_alone_says_so(
    fingerprints: Fingerprints, schedule: str, last: str, says_how: bool
) -> None:
    """Under the same settings, they once fell from the first step on."""
    fingerprints(("phase1", "schedule", schedule), ("phase1", "final_masked_lm_prob", last))
    assert Pretrain(phase=1).parameters().get("mask_schedule") == (2 if says_how else None)


def test_a_budget_replaces_the_number_of_steps(fingerprints: Fingerprints) -> None:
    budget = fingerprints(("phase1", "budget", "20m"))
    assert budget == fingerprints(("phase1", "budget", "1200s"), ("phase1", "max_steps", "600"))
    assert budget != fingerprints(("phase1", "budget", "21m"))
    assert Pretrain(phase=1).max_steps is None


#: The defaults at the time of `RECORDED` that are different now.
THEN = (
    *(("dataset", "masking", "static"), ("dataset", "dupe_factor", "5")),
    *(("model", "hidden_dropout_prob", "0.1"), ("model", "attention_probs_dropout_prob", "0.1")),
    *(("phase1", "masked_lm_prob", "0.15"), ("phase1", "final_masked_lm_prob", "")),
    *(("phase1", "optimizer", "AdamW"), ("phase1", "lr", "1e-3"), ("phase1", "word_embeddings", "random")),
    *(("phase1", "initial_attention", "random"), ("phase1", "next_sentence_weight", "1")),
    *(("phase1", "global_batch_size", "64"), ("phase1", "micro_batch_size", "32"), ("phase1", "max_steps", "500")),
    *(("phase2", "optimizer", "AdamW"), ("phase2", "lr", "5e-4"), ("phase2", "new_positions", "initial")),
    ("phase2", "next_sentence_weight", "1"),
    *(("phase2", "global_batch_size", "32"), ("phase2", "max_steps", "100")),
)
#: Settings → the first digits of fingerprints that an earlier version gave to stages. They must not change: a work
#: directory that was complete stays complete. (Those of Precompile depend on the versions on this machine.)
RECORDED = [
    (
        (
            *(("corpus", "source", "{tmp}/a.txt"), ("corpus", "held_out_source", "{tmp}/b.txt")),
            *(("corpus", "vocab_file", "{tmp}/vocab.txt"), ("corpus", "document", "file")),
        ),
        {
            "tokenize_corpus": "05ff280e6a", "shard_dataset-phase1": "4be4044f35", "convert_checkpoint": "2a7b76962a",
            "merge_shards": "ad64c995d0", "evaluate": "6c71a9a7d6", "report": "8325830eb4",
            "download_mnist": "fbd42d1cbb", "evaluate_mlp": "717cbfec71",
        },
    ),
    (
        (*DOWNLOADED, ("corpus", "vocab_file", "{tmp}/vocab.txt")),
        {"download_dataset-phase1": "e5fd2a793e", "pretrain-phase2": "adfc7d90be", "merge_shards": "c00902a013"},
    ),
    (
        (
            *(("dataset", "phase1_url", "s3://b/1.tar"), ("dataset", "phase2_url", "https://h/2.tar?token=x")),
            ("dataset", "phase1_sha256", "0" * 64),
        ),
        {"download_dataset-phase1": "a9951b7a7c", "download_dataset-phase2": "a41783eeb0"},
    ),
    (
        (("phase2", "start_from", "s3://b/ckpt_5.pt"), *DOWNLOADED),
        {"convert_checkpoint": "11f799dd18", "pretrain-phase2": "abaef02f8b", "report": "aebb22781c"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "recorded"), RECORDED)
def test_fingerprints_are_those_of_earlier_versions(
    fingerprints: Fingerprints, settings: tuple[tuple[str, str, str], ...], recorded: dict[str, str]
) -> None:
    found = fingerprints(*THEN, *settings)
    assert {stage: found[stage][:10] for stage in recorded} == recorded
