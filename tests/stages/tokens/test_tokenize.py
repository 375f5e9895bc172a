"""Tokenizing: the ids are those of Hugging Face's tokenizer, and the bytes are the same however it runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from common.errors import UserError
from stages.directory.manifest import Identity, StageDirectory
from stages.text import spans
from stages.text.corpus import TokenizeOptions
from stages.tokens import parts
from stages.tokens.encode import tokenize_corpus
from stages.tokens.files import TEST, TRAINING, part_paths, read_part
from stages.tokens.wordpiece import Encoder, build_tokenizer, count_words, learn_vocabulary, save_tokenizer
from tests.conftest import ROOT, Stage
from tests.helpers.corpora import documents
from tests.helpers.support import assert_one_line_error
from trainer.data.vocabulary import SPECIAL_TOKENS, read_vocabulary

WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in ("a", "ei", "o", "u") for c in ("rt", "ll", "nd", "s")]


def write_corpus(path: Path, *, documents: int, seed: int = 0) -> Path:
    draw = random.Random(seed)
    text = []
    for _ in range(documents):
        for _ in range(draw.randint(1, 12)):
            text.append(" ".join(draw.choices(WORDS, k=draw.randint(3, 20))).capitalize() + ".")
        text.append("")
    path.write_text("\n".join(text))
    return path


def outputs(directory: Path) -> dict[str, bytes]:
    files = [*directory.glob("*.hdf5"), *directory.glob("tokenizer/*")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def counts(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "manifest.json").read_text())["counts"])


def all_tokens(directory: Path, split: str) -> list[int]:
    return [int(i) for path in part_paths(directory, split) for i in read_part(path)["tokens"]]


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_are_berttokenizerfasts_read_from_the_directory(
    tmp_path: Path, shared: Path, stage: Stage, lower_case: bool
) -> None:
    from transformers import BertTokenizerFast  # type: ignore[attr-defined, unused-ignore]

    text = shared / "data/wikitext-2/valid.txt"
    case = "--lower-case" if lower_case else "--no-lower-case"
    # a newly learned vocabulary for cased text, the original one for uncased
    vocabulary = ("--vocab-file", shared / "data/vocab/bert-uncased.txt") if lower_case else ("--vocab-size", 3000)
    ran = stage("tokenize", "--source", text, "--out", tmp_path, "--held-out", 0, "--processes", 1, case, *vocabulary)
    assert ran.returncode == 0, ran.stderr
    tokenizer = BertTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    lines = [line for line in text.read_text().split("\n") if line.strip()]
    expected = [i for ids in tokenizer(lines, add_special_tokens=False)["input_ids"] for i in ids]
    assert all_tokens(tmp_path, TRAINING) == expected
    assert counts(tmp_path)["tokens"] == len(expected)
    assert counts(tmp_path)["unknown_share"] == round(expected.count(tokenizer.unk_token_id) / len(expected), 6)
    assert tokenizer.convert_ids_to_tokens([tokenizer.mask_token_id]) == ["[MASK]"]
    pair = tokenizer("First", "second")
    assert pair["token_type_ids"][-2:] == [1, 1]
    assert [pair["input_ids"][0], pair["input_ids"][-1]] == [tokenizer.cls_token_id, tokenizer.sep_token_id]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lower_case"),
    [
        ("wikitext-2/train.txt", True),
        ("wikitext-2/valid.txt", False),
        ("wikipedia/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2", True),
        ("wikipedia/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2", False),
    ],
)
def test_ids_of_all_real_text_are_berttokenizerfasts(tmp_path: Path, shared: Path, name: str, lower_case: bool) -> None:
    from transformers import BertTokenizerFast  # type: ignore[attr-defined, unused-ignore]

    copy = tmp_path / ("dump.xml.bz2" if name.endswith(".bz2") else "text.txt")
    copy.symlink_to(shared / "data" / name)
    vocabulary = read_vocabulary(shared / "data/vocab/bert-uncased.txt")
    save_tokenizer(tmp_path, vocabulary, lower_case=lower_case)
    lines = [sentence for document in documents(copy) for sentence in document]
    assert sum(map(len, lines)) > 1_000_000
    expected = BertTokenizerFast.from_pretrained(tmp_path)(lines, add_special_tokens=False)["input_ids"]
    ids, lengths = Encoder(vocabulary, lower_case=lower_case).encode(lines)
    assert lengths.tolist() == [len(one) for one in expected]
    np.testing.assert_array_equal(ids, np.concatenate([np.array(one, np.uint32) for one in expected]))


def test_a_vocabulary_of_our_own_survives_transformers_with_its_special_ids(tmp_path: Path, stage: Stage) -> None:
    from transformers import AutoTokenizer

    text = write_corpus(tmp_path / "text", documents=50)
    ran = stage("tokenize", "--source", text, "--out", tmp_path / "o", "--vocab-size", 200, "--processes", 1)
    assert ran.returncode == 0, ran.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "o/tokenizer")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert len(tokenizer) == counts(tmp_path / "o")["vocab_size"] <= 200
    assert (tokenizer.pad_token, tokenizer.mask_token) == ("[PAD]", "[MASK]")


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_of_any_unicode_are_the_librarys(shared: Path, lower_case: bool) -> None:
    vocabulary = read_vocabulary(shared / "data/vocab/bert-uncased.txt")
    draw = random.Random(1)
    ranges = [(1, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0xE000, 0x10FFFF), (0x300, 0x370), (0x1D160, 0x1D170)]
    texts = [
        "",
        " ",
        "[MASK] x",
        "x" * 101,
        "é" * 100 + "e",
        "中文 字",
        "ﬁ İ ß Σας",
        "a\x00b\u200bc\ufffdd",
        "\u302e\u1b44a",
    ]
    for _ in range(4000):
        low, high = draw.choice(ranges)
        texts.append("a" + "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 12))) + "b 1")
    texts = [text.replace("\n", " ") for text in texts]
    reference = build_tokenizer(vocabulary, lower_case=lower_case)
    reference.encode_special_tokens = True  # the corpus has no special tokens, only their spelling
    expected = [encoded.ids for encoded in reference.encode_batch(texts, add_special_tokens=False)]
    ids, lengths = Encoder(vocabulary, lower_case=lower_case).encode(texts)
    got = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    assert [(t, g) for t, g, e in zip(texts, got, expected, strict=True) if g != e] == []


def test_the_learned_vocabulary_is_the_same_every_time_and_the_librarys_in_all_but_order(shared: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    lines = (shared / "data/wikitext-2/valid.txt").read_text().split("\n")
    words = count_words(lines, lower_case=True)
    learned = learn_vocabulary(words, size=2000)
    assert learned == learn_vocabulary(words, size=2000)
    assert tuple(learned[:5]) == SPECIAL_TOKENS
    assert len(set(learned)) == 2000
    reference = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer(lowercase=True)
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=2000, min_frequency=2, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    reference.train_from_iterator(lines, trainer)
    # Ties are broken differently (there, by a random hash), which shows in the last merges.
    assert len(set(learned) & set(reference.get_vocab())) > 1950


@pytest.mark.slow
def test_processes_do_not_show_in_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_corpus(tmp_path / "text", documents=400)
    monkeypatch.setattr(parts, "_PART_CHARACTERS", 40_000)
    monkeypatch.setattr(parts, "_BATCH_CHARACTERS", 5_000)
    monkeypatch.setattr(spans, "_CHUNK_BYTES", 10_007)  # documents continue from one chunk into the next
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps({"text": " ".join(WORDS[n : n + 9])}) + "\n" for n in range(100)))
    options = TokenizeOptions(sources=(str(text), str(records)), vocab_size=300, held_out=0.1)
    made = {}
    for processes in (1, 2, 3, 5):
        directory = tmp_path / str(processes)
        with StageDirectory.begin(directory, options.identity) as work:
            tokenize_corpus(work, options, processes=processes)
        made[processes] = outputs(directory), counts(directory), (directory / "DATACARD.md").read_bytes()
    assert len([name for name in made[1][0] if TRAINING in name]) > 3
    assert made[1] == made[2] == made[3] == made[5]


@pytest.mark.parametrize(
    "where", ["write-after:vocab.txt", "write-after:tokens_training_00000.hdf5", "rename-before:manifest.json"]
)
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, stage: Stage, where: str) -> None:
    text = write_corpus(tmp_path / "text", documents=100)
    arguments = ("--source", text, "--vocab-size", 300, "--processes", 1, "--out")
    assert stage("tokenize", *arguments, tmp_path / "whole").returncode == 0
    assert stage("tokenize", *arguments, tmp_path / "killed", FAILPOINT=where).returncode == -9
    assert not (tmp_path / "killed/manifest.json").exists()
    again = stage("tokenize", *arguments, tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    assert outputs(tmp_path / "killed") == outputs(tmp_path / "whole")
    assert counts(tmp_path / "killed") == counts(tmp_path / "whole")
    assert "complete already" in stage("tokenize", *arguments, tmp_path / "killed").stderr


def test_a_corpus_of_few_documents_still_holds_two_out_and_says_so(tmp_path: Path, stage: Stage) -> None:
    text = write_corpus(tmp_path / "text", documents=5)
    ran = stage("tokenize", "--source", text, "--out", tmp_path / "o", "--vocab-size", 200, "--processes", 1)
    assert ran.returncode == 0
    assert "note: only 5 documents; 2 of them are held out" in ran.stderr
    assert (counts(tmp_path / "o")["documents"], counts(tmp_path / "o")["held_out_documents"]) == (3, 2)


def test_the_vocabulary_never_sees_held_out_text(tmp_path: Path, stage: Stage) -> None:
    text = write_corpus(tmp_path / "text", documents=20)
    held_out = tmp_path / "held"
    held_out.write_text("Zyx zyx zyx zyx.\n\nZyx zyx zyx zyx zyx.")
    arguments = ("--source", text, "--held-out-source", held_out, "--vocab-size", 300, "--processes", 1)
    assert stage("tokenize", *arguments, "--out", tmp_path / "o").returncode == 0
    assert not any("z" in piece for piece in read_vocabulary(tmp_path / "o/tokenizer/vocab.txt"))
    assert set(all_tokens(tmp_path / "o", TEST)) == {1, read_vocabulary(tmp_path / "o/tokenizer/vocab.txt").index(".")}
    assert counts(tmp_path / "o")["held_out_documents"] == 2


def test_the_vocabulary_never_sees_the_share_that_is_held_out(tmp_path: Path, stage: Stage) -> None:
    """Each document has a letter of its own."""
    letters = [chr(0x0561 + number) for number in range(38)]  # Armenian, lower case
    text = tmp_path / "text"
    text.write_text("\n\n".join(" ".join([f"{one}{one} {one}{one}{one} word."] * 20) for one in letters))
    given = ("--source", text, "--held-out", 0.25, "--vocab-size", 300, "--max-unknown-share", 1, "--processes", 1)
    ran = stage("tokenize", *given, "--out", tmp_path / "o")
    assert ran.returncode == 0, ran.stderr
    pieces = "".join(read_vocabulary(tmp_path / "o/tokenizer/vocab.txt"))
    unseen = [one for one in letters if one not in pieces]
    assert len(unseen) == counts(tmp_path / "o")["held_out_documents"] >= 5
    assert 1 in all_tokens(tmp_path / "o", TEST)
    assert 1 not in all_tokens(tmp_path / "o", TRAINING)


def test_datasets_are_contiguous_and_small(tmp_path: Path, stage: Stage) -> None:
    text = write_corpus(tmp_path / "text", documents=50)
    assert stage("tokenize", "--source", text, "--out", tmp_path / "o", "--vocab-size", 200).returncode == 0
    with h5py.File(tmp_path / "o/tokens_training_00000.hdf5") as file:
        assert {key: str(file[key].dtype) for key in file} == {
            "tokens": "uint16", "sentence_lengths": "uint32", "document_lengths": "uint32",
        }  # fmt: skip
        assert all(file[key].chunks is None for key in file)
        assert file["sentence_lengths"][()].sum() == len(file["tokens"])
        assert file["document_lengths"][()].sum() == len(file["sentence_lengths"])


def test_bad_input_is_refused_in_one_line(tmp_path: Path, stage: Stage) -> None:
    text = write_corpus(tmp_path / "text", documents=50)
    (tmp_path / "vocab").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword")
    (tmp_path / "later").write_text("[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\nword")
    (tmp_path / "one").write_text("One document only.")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "controls").write_bytes(b"\x00\x01\n\x07\n")
    cases: list[tuple[list[object], str]] = [
        (["--source", tmp_path / "none"], "none matches no file"),
        (["--source", tmp_path / "latin"], "is not UTF-8: byte 0xe9 at offset 3"),
        (["--source", text, "--vocab-file", tmp_path / "vocab"], "lacks [MASK]"),
        (["--source", text, "--vocab-file", tmp_path / "later"], "begins with '[UNK]'; its first piece must be [PAD]"),
        (["--source", text, "--vocab-file", tmp_path / "nope"], "cannot read the vocabulary"),
        (["--source", text, "--vocab-size", 12], "a vocabulary of 12 pieces cannot hold"),
        (["--source", text, "--held-out", 1], "--held-out is 1"),
        (["--source", tmp_path / "one"], "the corpus has 1 document; at least 4 are needed"),
        (["--source", tmp_path / "none*.txt"], "none*.txt matches no file"),
        (["--source", tmp_path / "empty"], "holds no text: it is empty"),
        (["--source", tmp_path / "controls"], "holds no text: nothing was left (lines: control characters only 2)"),
    ]
    for number, (arguments, message) in enumerate(cases):
        ran = stage("tokenize", *arguments, "--out", tmp_path / str(number), "--processes", 1)
        assert_one_line_error(ran, message)


def vocabulary_of(path: Path, *pieces: str) -> Path:
    path.write_text("\n".join([*SPECIAL_TOKENS, *pieces]))
    return path


def test_a_vocabulary_that_cannot_spell_the_text_is_refused_unless_allowed(tmp_path: Path, stage: Stage) -> None:
    text = tmp_path / "text"
    # in each document 19 known tokens and 1 that is not: 5 %, which is not more than 5 %
    text.write_text("\n\n".join(["known " * 19 + "Жизнь"] * 40))
    vocabulary = vocabulary_of(tmp_path / "vocab", "known")
    arguments = ("--source", text, "--vocab-file", vocabulary, "--processes", 1, "--out")
    assert stage("tokenize", *arguments, tmp_path / "o").returncode == 0
    assert counts(tmp_path / "o")["unknown_share"] == 0.05
    text.write_text("\n\n".join(["known " * 18 + "Жизнь strange"] * 40))
    ran = stage("tokenize", *arguments, tmp_path / "p")
    assert_one_line_error(ran, "10.0% of", "tokens are [UNK]", "жизнь strange", "allowed: 5.0%", "--max-unknown-share")
    assert not (tmp_path / "p/manifest.json").exists()
    # raising the limit continues with what is there
    again = stage("tokenize", *arguments, tmp_path / "p", "--max-unknown-share", 0.1)
    assert again.returncode == 0, again.stderr
    assert counts(tmp_path / "p")["unknown_share"] == 0.1
    assert "--max-unknown-share is 2" in stage("tokenize", *arguments, tmp_path / "q", "--max-unknown-share", 2).stderr


def test_too_many_unknown_words_are_refused_early_and_never_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_PART_CHARACTERS", 100_000)
    monkeypatch.setattr(parts, "_BATCH_CHARACTERS", 20_000)
    strange, known = "Жизнь strange words here.\n\n", "known known known known known.\n\n"
    vocabulary = vocabulary_of(tmp_path / "vocab", "known", ".")

    def run(name: str, text: str) -> int:
        """Returns how many parts were written before the end, or before it was refused."""
        (tmp_path / name).write_text(text)
        options = TokenizeOptions(sources=(str(tmp_path / name),), vocab_file=vocabulary)
        with StageDirectory.begin(tmp_path / f"{name}-tokens", options.identity) as work:
            tokenize_corpus(work, options, processes=1)
        return len(part_paths(tmp_path / f"{name}-tokens", TRAINING))

    many = 150_000  # 4 MB: several blocks
    with pytest.raises(UserError, match=r"tokens are \[UNK\]"):
        run("all strange", strange * many)
    early = len(part_paths(tmp_path / "all strange-tokens", TRAINING))
    # a twentieth of it at the beginning: in the first part nearly all tokens are unknown
    assert run("strange first", strange * (many // 30) + known * many) > 10 > early


def test_a_part_made_after_a_restart_is_weighed_by_its_share_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of the last part are unknown, which are 2 % of the corpus; all other parts exist already."""
    monkeypatch.setattr(parts, "_PART_CHARACTERS", 100_000)
    text, out = tmp_path / "text", tmp_path / "tokens"
    text.write_text("known known known known known.\n\n" * 30_000 + "Strange strange words.\n\n" * 1000)
    vocabulary = vocabulary_of(tmp_path / "vocab", "known", ".")
    options = TokenizeOptions(sources=(str(text),), vocab_file=vocabulary, held_out=0.0)

    def run() -> None:
        with StageDirectory.begin(out, options.identity) as work:
            tokenize_corpus(work, options, processes=1)

    run()
    made = outputs(out)
    last = part_paths(out, TRAINING)[-1]
    assert (read_part(last)["tokens"] == SPECIAL_TOKENS.index("[UNK]")).mean() > 0.5
    for path in (last, out / "manifest.json"):
        path.unlink()
    run()
    assert outputs(out) == made


@pytest.mark.parametrize("name", ["tokenizer/vocab.txt", "tokens_training_00000.hdf5"])
def test_a_damaged_corpus_is_made_again_with_the_same_bytes(tmp_path: Path, stage: Stage, name: str) -> None:
    """Not with the words that are left in its vocabulary."""
    text, out = write_corpus(tmp_path / "text", documents=20), tmp_path / "o"
    arguments = ("--source", text, "--vocab-size", 200, "--processes", 1, "--out", out)
    assert stage("tokenize", *arguments).returncode == 0
    before = outputs(out)
    (out / name).write_bytes(before[name][: len(before[name]) // 2])
    again = stage("tokenize", *arguments)
    assert again.returncode == 0, again.stderr
    assert outputs(out) == before


def test_other_settings_never_touch_a_finished_corpus(tmp_path: Path, stage: Stage) -> None:
    text = write_corpus(tmp_path / "text", documents=20)
    arguments = ("--source", text, "--vocab-size", 200, "--processes", 1, "--out", tmp_path / "o")
    assert stage("tokenize", *arguments).returncode == 0
    before = outputs(tmp_path / "o")
    refused = stage("tokenize", *arguments, "--seed", 7)
    assert refused.returncode == 1
    assert "seed: 12345 → 7" in refused.stderr
    assert outputs(tmp_path / "o") == before


def test_the_identity_is_content_not_place(tmp_path: Path) -> None:
    def identity(path: Path) -> Identity:
        return TokenizeOptions(sources=(str(path),)).identity()

    first, second = write_corpus(tmp_path / "a", documents=5), write_corpus(tmp_path / "b", documents=5)
    assert identity(first) == identity(second)
    assert identity(first) != identity(write_corpus(tmp_path / "c", documents=5, seed=1))


def test_a_killed_command_leaves_no_process_behind(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text", documents=100)
    command = [
        sys.executable,
        "-m",
        "stages.tokenize",
        "--source",
        str(text),
        "--vocab-size",
        "300",
        "--processes",
        "2",
    ]
    environment = {**os.environ, "FAILPOINT": "write-after:tokens_training_00000.hdf5"}  # the parent writes this
    killed = subprocess.Popen(
        [*command, "--out", tmp_path / "o"],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    assert killed.wait(60) == -9
    deadline = time.monotonic() + 10
    while (left := processes_of_session(killed.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def processes_of_session(session: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(process.name))
    return found


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_corpus(tmp_path / "text", documents=200)
    options = TokenizeOptions(sources=(str(text),), vocab_size=300)
    about = int(0.4 * text.stat().st_size)

    def run(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        with StageDirectory.begin(tmp_path / "o", options.identity) as work:
            tokenize_corpus(work, options, processes=1)

    with pytest.raises(UserError, match=f"the ids of this text need about {about:,} bytes in .*; {about - 1:,} are"):
        run(about - 1)
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"lock", "stage.json"}
    run(about)
    # Words of this text are two or three pieces each; the estimate is a lower bound.
    assert sum(path.stat().st_size for path in (tmp_path / "o").glob("*.hdf5")) > about
