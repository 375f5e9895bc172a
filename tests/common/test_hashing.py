"""Input files: what is hashed is what is read, and what was hashed is not read again."""

from __future__ import annotations

import bz2
import gzip
import os
import resource
import shutil
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import hashing
from common.errors import UserError
from common.files import sha256_of
from common.hashing import InputHashes
from common.secrets import Secret
from common.zstd import zstd
from stages.directory.manifest import StageDirectory, why_incomplete
from stages.download import DownloadOptions, download_dataset
from stages.evaluate import EvaluateOptions
from stages.text.corpus import TokenizeOptions, open_sources, raw_documents
from stages.tokens.encode import tokenize_corpus
from stages.tokens.files import TRAINING, part_paths
from tests.helpers.chain import Chain
from tests.helpers.ready import bytes_of, download, pack, write
from tests.helpers.support import flip_a_byte


def edit_unseen(path: Path) -> None:
    """Change a byte in the middle of a file, and restore its size and modification time."""
    stat = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are remembered even if they have not been unchanged for two seconds."""
    monkeypatch.setattr(hashing, "_SETTLED_NS", -1)


def test_a_file_is_read_once_and_again_when_anything_about_it_changes(
    tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    hash_file = hashing._hash_file
    monkeypatch.setattr(hashing, "_hash_file", lambda path: read.append(path) or hash_file(path))
    path = tmp_path / "text"
    path.write_bytes(os.urandom(300_000))

    def known() -> bool:
        """Hash it as a new process would; returns whether it was known, and so not read."""
        read.clear()
        assert InputHashes(tmp_path / "inputs.json").sha256(path) == sha256_of(path)
        return not read

    assert not known()
    assert known()
    edit_unseen(path)
    assert not known()
    path.replace(tmp_path / "other")
    shutil.copy2(tmp_path / "other", path)
    assert not known()
    (tmp_path / "inputs.json").write_text('{"' + str(path) + '": [1, null], "x": {}}')
    assert not known()
    (tmp_path / "inputs.json").write_bytes(b"\0" * 100)
    assert not known()


def test_a_file_that_may_change_within_one_tick_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "text"
    hashes = InputHashes(tmp_path / "inputs.json")
    for content in ("one", "two"):
        path.write_text(content)
        os.utime(path, ns=(1, 1))
        assert hashes.sha256(path) == sha256_of(path)


def test_a_hundred_times_the_files_take_a_hundred_times_the_work(tmp_path: Path, settled: None) -> None:
    """In seconds of one core. Rewriting the memory for each file took 12 s for 4,000 files."""
    (tmp_path / "texts").mkdir()
    for number in range(4000):
        (tmp_path / f"texts/{number}.txt").write_text(f"Text {number}.")
    seconds = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF)
        hashes = InputHashes(tmp_path / "inputs.json")
        TokenizeOptions(sources=(str(tmp_path / "texts/*.txt"),)).identity(hashes)
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    first, second = seconds
    assert first < 4
    assert second < 0.5


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.bz2", "a.txt.zst"])
def test_an_edit_of_a_text_that_is_being_read_is_noticed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    # Text that does not compress, so that the packed files, too, are read in many blocks.
    text = "\n\n".join(os.urandom(1000).hex() for _ in range(6000)).encode()
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text))
    read = raw_documents(open_sources([str(path)], InputHashes()), Counter())
    next(read)
    edit_unseen(path)
    with pytest.raises(UserError, match=f"{name} was changed while it was in use; .* run the same command again"):
        list(read)


def test_a_text_that_was_edited_before_the_stage_reads_it_is_refused(tmp_path: Path) -> None:
    text, vocabulary = tmp_path / "a.txt", tmp_path / "vocab.txt"
    text.write_text("A word.\n\n" * 50)
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nword\n.\n")
    options = TokenizeOptions(sources=(str(text),), vocab_file=vocabulary)
    for number, edited in enumerate((text, vocabulary)):
        before = edited.read_bytes()
        with StageDirectory.begin(tmp_path / str(number), options.identity) as work:
            edited.write_bytes(before.replace(b"word", b"sword"))
            with pytest.raises(UserError, match="was changed while it was in use"):
                tokenize_corpus(work, options, processes=1)
            assert not part_paths(work.path, TRAINING)
            edited.write_bytes(before)
            tokenize_corpus(work, options, processes=1)


def test_a_finished_download_does_not_change_with_the_folder_it_came_from(folder: Path) -> None:
    out = folder.parent / "out"
    download(folder, out)
    before = bytes_of(out)
    for shard in folder.rglob("*.hdf5"):
        flip_a_byte(shard)
    assert bytes_of(out) == before
    assert not set(bytes_of(folder).values()) & set(before.values())


def test_shards_are_identified_by_every_byte(folder: Path) -> None:
    """Large enough for the middle to be far from both ends."""
    shard = write(folder / "large_training_0.hdf5", rows=20_000, S=64)
    archive = pack(folder, "")
    before = [DownloadOptions(url=Secret.address(str(path))).identity() for path in (folder, archive)]
    edit_unseen(shard)
    edit_unseen(archive)
    after = [DownloadOptions(url=Secret.address(str(path))).identity() for path in (folder, archive)]
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("packed", [False, True])
def test_shards_edited_before_the_stage_reads_them_are_refused(folder: Path, packed: bool) -> None:
    source = pack(folder, "") if packed else folder
    options = DownloadOptions(url=Secret.address(str(source)))
    with StageDirectory.begin(folder.parent / "out", options.identity) as work:
        write(folder / "deep/wiki_training_0.hdf5", largest=98)
        if packed:
            pack(folder, "")
        with pytest.raises(UserError, match="was changed while it was in use"):
            download_dataset(work, options)
        assert not list(work.path.glob("*.hdf5*"))


def test_without_room_for_copies_shards_are_links_and_an_edit_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "out"
    options = DownloadOptions(url=Secret.address(str(folder)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    monkeypatch.setattr("stages.transfer.shard_import._clone", lambda source, target: False)
    download(folder, out)
    assert "so its shards are hard links to the files in" in capsys.readouterr().err
    fingerprint = options.identity().fingerprint
    assert why_incomplete(out, fingerprint) is None
    flip_a_byte(folder / "deep/wiki_training_0.hdf5")
    reason = why_incomplete(out, fingerprint)
    assert reason is not None
    assert "wiki_training_0.hdf5 was altered: it is a hard link to a file that was edited" in reason


def test_replaced_shards_and_models_are_evaluated_anew(folder: Path) -> None:
    model = folder.parent / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")

    def identity() -> str:
        return EvaluateOptions(model=model, data=folder / "deep").identity().fingerprint

    seen = {identity()}
    # Frequencies are counted in the training shards.
    shards = (folder / "deep/wiki_test_0.hdf5", folder / "deep/wiki_training_0.hdf5")
    for path in (*shards, model / "config.json", model / "model.safetensors"):
        flip_a_byte(path)
        seen.add(identity())
    assert len(seen) == 5


@pytest.mark.slow
def test_a_pattern_means_the_same_to_the_pipeline_and_to_the_stage(tmp_path: Path) -> None:
    """Each file holds a word of its own, so the vocabulary tells which files were read."""
    files = ["d[1].txt", "d1.txt", "g/one.txt", "g/deep/er/two.txt", "with space.txt", "h/x.txt"]
    words = ["bracket", "digit", "shallow", "deep", "space", "other"]
    for name, word in zip(files, words, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n\n".join([f"{word} {word}."] * 10))
    patterns = ["d[1].txt", "g/**", "with space.txt"]
    chain = Chain(tmp_path)
    source = " ".join(f'"{tmp_path / pattern}"' for pattern in patterns)
    chain.run("TokenizeCorpus", "--Corpus-source", source)
    made = chain.latest("tokenize_corpus")
    vocabulary = set((made / "tokenizer/vocab.txt").read_text().split())
    assert vocabulary >= {"bracket", "shallow", "deep", "space"}
    assert not vocabulary & {"digit", "other"}
    options = TokenizeOptions(
        sources=tuple(str(tmp_path / pattern) for pattern in patterns), vocab_size=300, held_out=0.1, seed=12349
    )
    assert options.identity().fingerprint == str(chain.manifest("tokenize_corpus")["fingerprint"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("'a.txt", "[corpus] source: 'a.txt cannot be split into paths: no closing quotation"),
        ("{tmp}", "is a folder; name a file, or a quoted glob such as '{tmp}/*'"),
        ("{tmp}/corpus.txt {tmp}/corp*.txt", "corpus.txt is named 2 times; name each once"),
    ],
)
def test_a_source_that_means_nothing_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    chain = Chain(tmp_path)
    source, message = (text.replace("{tmp}", str(tmp_path)) for text in (source, message))
    assert message in chain.ask("why", "TokenizeCorpus", "--Corpus-source", source, status=35).stderr


def test_a_file_that_never_rests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a")
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: (path.touch(), time.sleep(0.02), fstat(fd))[-1])
    with pytest.raises(UserError, match="is being written: it changed 3 times while it was read"):
        InputHashes().sha256(path)
