"""The shards of a phase: balanced, drawn from the whole corpus, and the same bytes however they are made."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from common.errors import UserError
from common.workers import Workers
from stages.directory.builders import Builders
from stages.directory.manifest import StageDirectory
from stages.examples import plans, shard_writer, shards
from stages.examples.pairs import PAIR
from stages.examples.shard_writer import row_ranges
from stages.shard import ShardOptions, shard_dataset, tokens_fingerprint
from stages.tokens.files import TRAINING, part_paths, read_part
from tests.conftest import Disk, Stage
from tests.helpers.corpora import make_tokens
from tests.helpers.support import assert_one_line_error
from trainer.data.shards import KEYS, ShardSet
from trainer.data.validation import validate_file

FORM = ("--seq-len", 32, "--max-pred-len", 5)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus") / "tokens", documents=120)


def shards_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.hdf5"))}


def counts(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "manifest.json").read_text())["counts"])


def succeeded(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, ran.stderr


def test_shards_are_valid_balanced_and_counted(tmp_path: Path, stage: Stage, tokens: Path) -> None:
    succeeded(stage("shard", "--tokens", tokens, "--out", tmp_path, *FORM, "--shards", 7, "--test-shards", 2))
    rows = {}
    for path in tmp_path.glob("*.hdf5"):
        rows[path.name] = validate_file(path, seq_len=32, max_pred_len=5, vocab_size=120)
        with h5py.File(path) as file:
            kinds = {key: (str(file[key].dtype), file[key].shape[1:], file[key].chunks) for key in KEYS}
        assert kinds == {
            "input_ids": ("uint16", (32,), None),
            "input_mask": ("uint8", (32,), None),
            "segment_ids": ("uint8", (32,), None),
            "masked_lm_positions": ("uint16", (5,), None),
            "masked_lm_ids": ("uint16", (5,), None),
            "next_sentence_labels": ("uint8", (), None),
        }
    assert sorted(rows) == [f"bert_test_{n:05d}.hdf5" for n in range(2)] + [
        f"bert_training_{n:05d}.hdf5" for n in range(7)
    ]
    assert counts(tmp_path)["rows"] == rows
    training = [count for name, count in rows.items() if TRAINING in name]
    assert max(training) - min(training) <= 1
    assert counts(tmp_path)["training_rows"] == sum(training)
    assert not (tmp_path / "plan").exists()
    shards = ShardSet.open(tmp_path, seq_len=32, max_pred_len=5)
    mask = np.concatenate([shards.read(n, np.arange(r))["input_mask"] for n, r in enumerate(shards.rows_per_shard)])
    assert counts(tmp_path)["real_token_share"] == pytest.approx(mask.mean(), abs=0.01)


def test_processes_do_not_show_in_the_bytes(tmp_path: Path, stage: Stage, tokens: Path) -> None:
    arguments = ("--tokens", tokens, *FORM, "--shards", 5)
    succeeded(stage("shard", *arguments, "--out", tmp_path / "1", "--processes", 1))
    succeeded(stage("shard", *arguments, "--out", tmp_path / "2", "--processes", 2))
    one = shards_of(tmp_path / "1")
    assert len(one) == 6
    assert shards_of(tmp_path / "2") == one


@pytest.mark.parametrize(
    ("where", "processes"),
    [
        ("write-before:training_00002.bin", 1),
        ("write-after:bert_training_00003.hdf5", 1),
        ("rename-after:bert_training_00003.hdf5", 2),
        ("rename-before:manifest.json", 1),
    ],
)
def test_a_killed_run_ends_with_the_same_bytes(
    tmp_path: Path, stage: Stage, tokens: Path, where: str, processes: int
) -> None:
    arguments = ("--tokens", tokens, *FORM, "--shards", 5, "--processes", processes, "--out")
    succeeded(stage("shard", *arguments, tmp_path / "whole"))
    killed = stage("shard", *arguments, tmp_path / "killed", FAILPOINT=where)
    if processes == 1:
        assert killed.returncode == -9
    else:  # a worker died; the command survives to say so
        assert killed.returncode == 1
        assert "error: a worker process died" in killed.stderr
        assert "Traceback" not in killed.stderr
    assert not (tmp_path / "killed/manifest.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*.hdf5")}
    succeeded(stage("shard", *arguments, tmp_path / "killed"))
    assert shards_of(tmp_path / "killed") == shards_of(tmp_path / "whole")
    assert counts(tmp_path / "killed") == counts(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_every_shard_draws_from_the_whole_corpus_and_nothing_is_lost(tmp_path: Path, tokens: Path) -> None:
    options = ShardOptions(tokens=tokens, seq_len=32, max_pred_len=5, dupe_factor=3, shards=4, processes=1)
    assert len(part_paths(tokens, TRAINING)) > 3
    with (
        StageDirectory.begin(tmp_path, options.identity) as work,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(shard_writer, "_SLAB_BYTES", 20_000)  # several slabs per shard
        patch.setattr(plans, "_WINDOW_BYTES", 9_000)  # and several windows per slab, of one part or more
        shard_dataset(work, options)
    part_of_sentence, texts = {}, []
    for number, path in enumerate(part_paths(tokens, TRAINING)):
        part = read_part(path)
        texts.append("".join(map(chr, part["tokens"])))
        for sentence in np.split(part["tokens"], np.cumsum(part["sentence_lengths"])[:-1]):
            part_of_sentence[sentence.tobytes()] = number
    shards = ShardSet.open(tmp_path)
    seen: set[bytes] = set()
    for number, rows in enumerate(shards.rows_per_shard):
        arrays = shards.read(number, np.arange(rows))
        ids = arrays["input_ids"].copy()
        for row, (positions, labels) in enumerate(
            zip(arrays["masked_lm_positions"], arrays["masked_lm_ids"], strict=True)
        ):
            ids[row, positions[positions > 0]] = labels[positions > 0]
        # Both segments are pieces of the same part.
        for row in ids:
            first, second, _ = "".join(map(chr, row[1:])).split(chr(3), 2)
            assert any(first in text and second in text for text in texts)
        # Rows whose first segment is a single whole sentence tell which part of the corpus they come from.
        found = [row[1 : row.tolist().index(3)].tobytes() for row in ids]
        origin = Counter(part_of_sentence[sentence] for sentence in found if sentence in part_of_sentence)
        assert len(origin) == len(part_paths(tokens, TRAINING))
        order = [part_of_sentence[sentence] for sentence in found if sentence in part_of_sentence]
        assert (np.diff(order) < 0).mean() > 0.3
        seen |= {sentence for row in ids for sentence in (row[1 : row.tolist().index(3)].tobytes(),)}
    # Two thirds of the sentences are short enough to be a first segment in one of three repetitions.
    assert len(seen & part_of_sentence.keys()) > 0.3 * len(part_of_sentence)


def test_what_masking_knows_of_the_vocabulary_is_what_hugging_faces_tokenizer_says(tokens: Path) -> None:
    from transformers import BertTokenizerFast

    tokenizer = BertTokenizerFast.from_pretrained(tokens / "tokenizer")
    ours = shard_writer.load_vocabulary(tokens)
    assert (ours.size, ours.cls, ours.sep, ours.mask) == (
        len(tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id,
    )  # fmt: skip
    assert set(ours.ordinary.tolist()) == set(range(len(tokenizer))) - set(tokenizer.all_special_ids)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert ours.continues.tolist() == [piece.startswith("##") for piece in pieces]
    assert 0 < ours.continues.sum() < len(tokenizer)


def test_the_phases_draw_independently(tmp_path: Path, tokens: Path) -> None:
    """Same corpus, form and seed: without separate random streams both phases would have the same rows and masks."""
    drawn = {}
    for phase in (1, 2):
        options = ShardOptions(tokens=tokens, seq_len=32, max_pred_len=5, shards=1, phase=phase, processes=1)
        directory = tmp_path / str(phase)
        with StageDirectory.begin(directory, lambda made=options: made.identity(tokens_fingerprint(tokens))) as work:
            shard_dataset(work, options)
        with h5py.File(directory / "bert_training_00000.hdf5") as file:
            drawn[f"phase {phase}, random next sentence"] = file["next_sentence_labels"][:].astype(float)
            drawn[f"phase {phase}, second masked position"] = file["masked_lm_positions"][:, 1].astype(float)
            drawn[f"phase {phase}, length"] = file["input_mask"][:].sum(1).astype(float)
    rows = min(len(values) for values in drawn.values())
    assert rows > 500
    phases = [
        np.stack([values[:rows] for name, values in drawn.items() if name.startswith(phase)])
        for phase in ("phase 1", "phase 2")
    ]
    between = np.corrcoef(*phases)[:3, 3:]  # within a phase, the length and the positions depend on each other
    # Nine coefficients with a standard deviation of 1/√rows.
    assert np.abs(between).max() < 4 / np.sqrt(rows), dict(zip(drawn, between, strict=False))


def test_equal_parts_of_a_corpus_are_planned_independently(tmp_path: Path, tokens: Path) -> None:
    """Else document k of each of Wikipedia's 1,750 parts would be cut and paired alike."""
    options = ShardOptions(tokens=tokens, seq_len=32, max_pred_len=5, shards=1, processes=1)
    found, parts = plans.read_splits(tokens, options.form)[TRAINING], 6
    cut = found.cut[1] * np.arange(parts + 1)
    equal = dataclasses.replace(found, parts=found.parts[:1] * parts, cut=cut)
    with (
        Workers(1) as workers,
        StageDirectory.begin(tmp_path / "out", lambda: options.identity(tokens_fingerprint(tokens))) as work,
    ):
        plans.make_plans(
            work, {TRAINING: equal}, options.form, separator=3, seed=1, phase=1, workers=workers, builders=Builders()
        )
        paths = [plans.pairs_path(work.path / plans.PLAN, TRAINING, index) for index in range(parts)]
        drawn = [np.fromfile(path, PAIR) for path in paths]
    rows = min(map(len, drawn))
    assert rows > 300
    assert len({pairs.tobytes() for pairs in drawn}) == parts
    for name in ("random", "a_length"):
        between = np.corrcoef([pairs[name][:rows].astype(float) for pairs in drawn])
        assert np.abs(between[np.triu_indices(parts, 1)]).max() < 4.5 / np.sqrt(rows), name


def test_rows_are_dealt_out_evenly_and_completely() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = rng.integers(0, 50, rng.integers(1, 8))
        shares = int(rng.integers(1, 12))
        starts, ends = zip(*(row_ranges(rows, shares, share) for share in range(shares)), strict=True)
        sizes = np.array(ends) - np.array(starts)
        assert sizes.sum(axis=1).max() - sizes.sum(axis=1).min() <= 1
        assert (np.ptp(sizes, axis=0) <= 1).all()
        np.testing.assert_array_equal(starts[0], 0)
        np.testing.assert_array_equal(ends[-1], rows)
        np.testing.assert_array_equal(ends[:-1], starts[1:])


def test_held_out_rows_are_made_once(tmp_path: Path, tokens: Path, stage: Stage) -> None:
    arguments = ("--tokens", tokens, *FORM, "--shards", 1, "--short-seq-prob", 0, "--out")
    succeeded(stage("shard", *arguments, tmp_path / "1", "--dupe-factor", 1))
    succeeded(stage("shard", *arguments, tmp_path / "9", "--dupe-factor", 9))
    one, nine = counts(tmp_path / "1"), counts(tmp_path / "9")
    assert nine["test_rows"] == one["test_rows"]
    assert 8 < nine["training_rows"] / one["training_rows"] < 10


def test_a_vocabulary_of_more_than_65536_pieces_gives_wide_ids(tmp_path: Path, stage: Stage) -> None:
    (tmp_path / "vocab").write_text(
        "\n".join(
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"unused{n}" for n in range(70_000)), "last", "word"]
        )
    )
    (tmp_path / "text").write_text("\n\n".join(["last word last\nword last word last"] * 20))
    vocabulary = ("--vocab-file", tmp_path / "vocab", "--held-out", 0)
    succeeded(stage("tokenize", "--source", tmp_path / "text", "--out", tmp_path / "t", *vocabulary))
    succeeded(stage("shard", "--tokens", tmp_path / "t", "--out", tmp_path / "s", *FORM, "--shards", 1))
    rows = ShardSet.open(tmp_path / "s").read(0, np.array([0]))
    assert rows["input_ids"].dtype == rows["masked_lm_ids"].dtype == np.uint32
    assert set(rows["masked_lm_ids"][0][rows["masked_lm_positions"][0] > 0].tolist()) <= {70005, 70006}


def test_bad_input_is_refused_in_one_line(tmp_path: Path, stage: Stage, tokens: Path) -> None:
    (tmp_path / "one.txt").write_text("One document.\nOf two sentences.")
    tokenized = stage("tokenize", "--source", tmp_path / "one.txt", "--held-out", 0, "--out", tmp_path / "one")
    succeeded(tokenized)
    cases: list[tuple[list[object], str]] = [
        (["--tokens", tmp_path / "none", *FORM], "is not a finished tokenized corpus"),
        (
            ["--tokens", tokens, "--seq-len", 4, "--max-pred-len", 1],
            "--seq-len is 4; allowed: a whole number from 5",
        ),
        (["--tokens", tokens, "--seq-len", 32, "--max-pred-len", 0], "--max-pred-len is 0"),
        (["--tokens", tokens, *FORM, "--masked-lm-prob", 1.5], "--masked-lm-prob is 1.5"),
        (["--tokens", tokens, *FORM, "--shards", 0], "--shards is 0"),
        (["--tokens", tokens, *FORM, "--shards", 90_000], "too few for 90000 shards"),
        (["--tokens", tmp_path / "one", *FORM], "has 1 training document; 2 or more are needed"),
    ]
    for number, (arguments, message) in enumerate(cases):
        ran = stage("shard", *arguments, "--out", tmp_path / str(number), "--processes", 1)
        assert ran.returncode == 1
        assert message in ran.stderr
        assert ran.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in ran.stderr


def test_an_altered_corpus_is_not_used(tmp_path: Path, stage: Stage) -> None:
    corpus = make_tokens(tmp_path / "tokens", documents=40)
    manifest = json.loads((corpus / "manifest.json").read_text())
    part = part_paths(corpus, TRAINING)[0]
    manifest["outputs"] = [{"path": part.name, "bytes": 7, "sha256": ""}]
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    ran = stage("shard", "--tokens", corpus, "--out", tmp_path / "o", *FORM)
    assert ran.returncode == 1
    assert "its manifest says 7" in ran.stderr


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ShardOptions(tokens=tokens, seq_len=32, max_pred_len=5, shards=4, processes=1)

    def run(free: int) -> dict[str, Any]:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        with StageDirectory.begin(tmp_path, options.identity) as work:
            return shard_dataset(work, options)

    with pytest.raises(UserError, match=r"plan and shards need at least [\d,]+ bytes in .*; 1,000 are free there"):
        run(1_000)
    assert not list(tmp_path.rglob("*.bin")) + list(tmp_path.glob("*.hdf5"))
    # The first check's lower bound is less than what is needed; after planning the need is known.
    monkeypatch.setattr(shards, "_require_room", lambda *_: None)
    run(0)
    rows = counts(tmp_path)["training_rows"] + counts(tmp_path)["test_rows"]
    monkeypatch.undo()
    for path in (tmp_path / "manifest.json", *tmp_path.glob("*.hdf5")):
        path.unlink()
    needed = rows * (4 * 32 + 4 * 5 + 1)  # ids 2 bytes, mask and segments 1; positions and labels 2; next sentence 1
    with pytest.raises(UserError, match=r"the shards need [\d,]+ bytes"):
        run(needed - 1)
    assert not list(tmp_path.glob("*.hdf5"))
    assert run(needed)["training_rows"] > 0
    # Shards that are there already need no more room.
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "bert_training_00002.hdf5").unlink()
    assert run(needed // 3)["training_rows"] > 0


def test_a_full_disk_is_seen_before_planning(disk: Disk, stage: Stage, tokens: Path) -> None:
    disk.resize(100)
    ran = stage("shard", "--tokens", tokens, *FORM, "--out", disk.path / "out", "--processes", 1)
    assert_one_line_error(ran, "plan and shards need at least", "are free there; make space, or use another disk")
    assert {path.name for path in (disk.path / "out").iterdir()} == {"lock", "stage.json"}
