"""Files made to do harm: refused in one line, within stated memory, and nothing outside of them is read."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import random
import resource
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from common.errors import UserError
from tests.helpers.ready import pack, refused, write
from tests.helpers.support import ROOT, forked
from trainer.data.hdf5 import open_hdf5
from trainer.data.shards import KEYS, ShardSet, file_shape

MB = 1 << 20
#: Memory that a command may use in addition to its imports.
BOUND_BYTES = 400 * MB

#: Runs a module; reports at the end by how much its memory peaked above that of its imports.
MEASURED = """
import atexit, importlib, resource, runpy, sys
module, *imports = sys.argv[1].split(",")
for name in imports:
    importlib.import_module(name)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def tell():
    print("PEAK", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, file=sys.stderr)
atexit.register(tell)
sys.argv = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def refused_within(bound: int, module: str, *words: object, imports: tuple[str, ...] = ()) -> str:
    """The one line with which `python -m module words…` refuses, in less memory than `bound` on top of its imports."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, ",".join((module, *imports)), *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (200, 200)),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    (peak,) = (int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("PEAK "))
    assert peak < bound, f"{peak / MB:.0f} MB"
    return line


# Archives.


def tar_header(kind: bytes, size: int, name: str = "x") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax_records(count: int) -> bytes:
    return b"".join(b"%d %s=\n" % (len(key) + 6, key) for key in (b"k%08d" % number for number in range(count)))


def pax_bomb() -> bytes:
    """As published: a header of a few megabytes, with a record every 15 bytes."""
    records = pax_records(900_000)
    return tar_header(tarfile.XHDTYPE, len(records)) + padded(records)


def many_global_headers() -> bytes:
    out = io.BytesIO()
    for number in range(400):
        records = pax_records(4000).replace(b"k", b"%c" % (97 + number % 26))
        out.write(tar_header(tarfile.XGLTYPE, len(records)) + padded(records))
        out.write(tar_header(tarfile.REGTYPE, 0, f"{number}.txt"))
    return out.getvalue()


def long_name() -> bytes:
    return tar_header(tarfile.GNUTYPE_LONGNAME, 300 * MB) + bytes(300 * MB)


def headers_in_headers() -> bytes:
    """Each is the header of the next: tarfile calls itself for each."""
    return (tar_header(tarfile.GNUTYPE_LONGNAME, 2) + padded(b"x\0")) * 5000


def sparse_map() -> bytes:
    """An old GNU sparse file whose list of pieces continues through block after block."""
    head = bytearray(tar_header(tarfile.GNUTYPE_SPARSE, 0))
    head[482] = 1
    head[148:156] = b"%06o\0 " % (256 + sum(head[:148]) + sum(head[156:512]))
    entry = b"00000000001\0" * 42
    return bytes(head) + (entry + b"\1" + bytes(7)) * 60_000


def sparse_map_in_file() -> bytes:
    """GNU's newest form, whose list is in the file's own content."""
    record = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    return (
        tar_header(tarfile.XHDTYPE, len(record)) + padded(record)
        + tar_header(tarfile.REGTYPE, 20 * MB) + padded(b"30000000\n") + b"0\n" * (10 * MB)
    )  # fmt: skip


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "PAX header": (pax_bomb, "has a header of "),
    "global headers": (many_global_headers, "has more global headers than anybody writes"),
    "long name": (long_name, "has a header of 314,572,800 bytes, more than 65,536"),
    "headers in headers": (headers_in_headers, "has more headers than members need"),
    "sparse map": (sparse_map, "has a sparse file"),
    "sparse map in the file": (sparse_map_in_file, "has a sparse file"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archives_headers_take_no_memory(tmp_path: Path, name: str) -> None:
    """Compressed, such an archive takes a few kilobytes or megabytes."""
    make, words = ARCHIVES[name]
    with (tmp_path / "bomb.tar.gz").open("wb") as file:
        file.write(gzip.compress(make(), 1))
    said = refused_within(
        200 * MB, "stages.download", tmp_path / "bomb.tar.gz", "--out", tmp_path / "out", "--processes", 1
    )
    assert words in said


def test_a_long_name_and_a_comment_are_no_harm(tmp_path: Path) -> None:
    """git's archives begin with a global header; a name of 300 characters has one of its own, in both formats."""
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        shard = write(tmp_path / "in" / "x_training_0.hdf5")
        path = tmp_path / f"{form}.tar"
        with tarfile.open(path, "w", format=form, pax_headers={"comment": "0" * 40}) as tar:
            tar.add(shard, f"{'a' * 150}/{'b' * 150}/x_training_0.hdf5")
        assert forked("stages.download", path, "--out", tmp_path / f"out{form}", "--processes", 1).returncode == 0


def test_whatever_bytes_are_altered_an_archive_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Above all in headers: names, sizes, types and text of two archives, altered at random."""
    from stages.transfer.archive import members

    shard = write(tmp_path / "in" / "x_training_0.hdf5")
    rng, said = random.Random(0), list[str]()
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tmp_path / "whole.tar"
        with tarfile.open(path, "w", format=form, pax_headers={"comment": "c"}) as tar:
            tar.add(shard, f"{'é' * 120}/x_training_0.hdf5")
            tar.add(shard, "y_training_0.hdf5")
        whole = path.read_bytes()
        blocks = [at for at in range(0, len(whole), 512) if b"ustar" in whole[at : at + 512]]
        for _ in range(400):
            damaged = bytearray(whole)
            block = rng.choice(blocks)
            for _ in range(rng.randrange(1, 4)):
                damaged[block + rng.randrange(1024)] = rng.choice([0, 45, 48, 57, 76, 83, 103, 120, 128, 255])
            head = damaged[block : block + 512]
            damaged[block + 148 : block + 156] = b"%06o\0 " % (256 + sum(head[:148]) + sum(head[156:]))
            path.write_bytes(damaged)
            try:
                for member in members(path):
                    while member.read(MB):
                        pass
            except UserError as error:
                said.append(str(error))
    assert len(said) > 30
    assert not any("\n" in line for line in said)


# Shards.


def with_dataset(path: Path, key: str, make: Callable[[h5py.File], object]) -> Path:
    """A good shard of 64 rows whose `key` is replaced."""
    write(path, rows=64)
    with h5py.File(path, "a") as file:
        del file[key]
        make(file)
    return path


def _external(file: h5py.File) -> None:
    secret = Path(file.filename).with_name("secret.bin")
    secret.write_bytes(bytes(range(64)) * 32)
    file.create_dataset("input_ids", (64, 16), "u2", external=[(str(secret), 0, 2048)])


def _virtual(file: h5py.File) -> None:
    other = write(Path(file.filename).with_name("other.hdf5"), rows=64)
    layout = h5py.VirtualLayout((64, 16), "u2")
    layout[:] = h5py.VirtualSource(other, "input_ids", (64, 16))
    file.create_virtual_dataset("input_ids", layout)


def _external_link(file: h5py.File) -> None:
    other = write(Path(file.filename).with_name("other.hdf5"), rows=64)
    file["input_ids"] = h5py.ExternalLink(str(other), "input_ids")


def _soft_link(file: h5py.File) -> None:
    file["input_ids"] = h5py.SoftLink("/segment_ids")


def _sparse(file: h5py.File) -> None:
    dataset = file.create_dataset("input_ids", (64, 16), "u2", chunks=(8, 16))
    dataset[:8] = 5


def _unwritten(file: h5py.File) -> None:
    file.create_dataset("input_ids", (64, 16), "u2")


SHARDS: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "external storage": (_external, "has its content in other files, which is not followed"),
    "virtual": (_virtual, "has its content in other files, which is not followed"),
    "external link": (_external_link, "is a link to a dataset elsewhere, which is not followed"),
    "soft link": (_soft_link, "is a link to a dataset elsewhere"),
    "chunks missing": (_sparse, "parts of input_ids were never written"),
    "nothing written": (_unwritten, "parts of input_ids were never written"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_holds_all_its_data_itself(tmp_path: Path, name: str) -> None:
    """On import, and when training opens a directory that was never imported."""
    make, words = SHARDS[name]
    path = with_dataset(tmp_path / "in" / "x_training_0.hdf5", "input_ids", make)
    assert words in refused(path.parent, tmp_path / "out")
    (tmp_path / "in" / "other.hdf5").unlink(missing_ok=True)
    with pytest.raises(UserError, match=words):
        ShardSet.open(path.parent)
    (path.parent / "manifest.json").write_text(
        json.dumps({"counts": {"rows": {"w_training_0.hdf5": 64, path.name: 64}}})
    )
    write(path.with_name("w_training_0.hdf5"), rows=64)
    shards = ShardSet.open(path.parent)  # the manifest states what the second one has
    with pytest.raises(UserError, match=words):
        shards.read(1, np.arange(3))


def test_a_link_to_the_packed_lengths_is_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path / "x_training_0.hdf5", rows=64)
    with h5py.File(path, "a") as file:
        file["sequence_lengths"] = h5py.ExternalLink(str(tmp_path / "elsewhere.hdf5"), "x")
    with pytest.raises(UserError, match="sequence_lengths is a link to a dataset elsewhere"):
        file_shape(path, seq_len=None, max_pred_len=None)


def _claims(rows: int, length: int, chunks: tuple[int, int], dtype: str = "i4") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        shapes: dict[str, tuple[int, ...]] = {key: (rows, length) for key in KEYS}
        shapes |= {"masked_lm_positions": (rows, 2), "masked_lm_ids": (rows, 2), "next_sentence_labels": (rows,)}
        with h5py.File(path, "w") as file:
            for key, shape in shapes.items():
                chunk = tuple(map(min, zip(chunks, shape, strict=False)))
                file.create_dataset(key, shape, dtype, chunks=chunk, compression="gzip")
            file["input_ids"][:8, :128] = 1

    return make


def _one_chunk(path: Path) -> None:
    """600 MB of zeros in 600 kB."""
    with h5py.File(path, "w") as file:
        for key in KEYS:
            rows = (75_000_000, 2) if key in ("input_ids", "input_mask", "segment_ids") else (75_000_000, 1)
            shape = rows[:1] if key == "next_sentence_labels" else rows
            dataset = file.create_dataset(key, shape, "i4", chunks=shape, compression="gzip", compression_opts=9)
            if key == "input_ids":
                dataset.id.write_direct_chunk((0, 0), _zeros(600 * 10**6))
            padding = np.random.default_rng(0).integers(0, 255, 1_000_000, np.uint8)
        file["padding"] = padding


def _zeros(count: int) -> bytes:
    packer = zlib.compressobj(1)
    return b"".join([*(packer.compress(bytes(MB)) for _ in range(count // MB)), packer.flush()])


CLAIMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "rows": (_claims(10**12, 128, (8, 128)), "parts of input_ids were never written"),
    "row length": (_claims(8, 10**9, (1, 1024)), "parts of input_ids were never written"),
    "one chunk": (_one_chunk, "has chunks of 600,000,000 bytes; at most 536,870,912 are read"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_shard_that_claims_more_than_it_holds_takes_no_memory(tmp_path: Path, name: str) -> None:
    make, words = CLAIMS[name]
    (tmp_path / "in").mkdir()
    make(tmp_path / "in" / "x_training_0.hdf5")
    said = refused_within(
        BOUND_BYTES, "stages.download", tmp_path / "in", "--out", tmp_path / "out", "--processes", 1,
        imports=("trainer.data.validation",),
    )  # fmt: skip
    assert words in said


def test_a_contiguous_dataset_beyond_the_files_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x_training_0.hdf5", rows=64)
    shards = ShardSet.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match="make or fetch it again"):
        shards.read(0, np.arange(64))
    with open_hdf5(write(path, rows=64)) as file:
        assert file["input_ids"].shape == (64, 16)


# Checkpoints and models.


def deflated(path: Path) -> None:
    """600 MB of zeros in 0.6 MB, as a tensor of a checkpoint."""
    torch.save({"model": {"bert.embeddings.word_embeddings.weight": torch.zeros(4)}}, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            if not name.endswith("data/0"):
                archive.writestr(name, content)
        with archive.open(f"{next(iter(records)).split('/')[0]}/data/0", "w", force_zip64=True) as record:
            for _ in range(600):
                record.write(bytes(MB))


def large_pickle(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02(" + b"]" * (40 * MB) + b"l.")
        archive.writestr("x/version", b"3\n")


def sized(path: Path) -> None:
    """A pickle that makes an array of 100 GB from its length."""
    made = b"\x80\x02c__builtin__\nbytearray\n(L100000000000L\ntR."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x/data.pkl", made)
        archive.writestr("x/version", b"3\n")


def large_directory(path: Path) -> None:
    """A list of records that claims to have 2 GB, in a file with holes for them."""
    size = 2 << 30
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(size)
        file.write(b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 65535, 65535, size - 4, 4, 0))


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "deflated": (deflated, "packs its record 'ckpt_7/data"),
    "pickle": (large_pickle, "has a pickle of 41,943,045 bytes, more than 16,777,216"),
    "made by its size": (sized, "creates a __builtin__.bytearray of a given size"),
    "list of records": (large_directory, "lists its records in 2,147,483,644 bytes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_not_unpacked_beyond_what_torch_saves(tmp_path: Path, name: str) -> None:
    make, words = CHECKPOINTS[name]
    make(tmp_path / "ckpt_7.pt")
    imports = ("torch", "trainer.checkpoint.interop")
    said = refused_within(BOUND_BYTES, "stages.convert", "--inspect", tmp_path / "ckpt_7.pt", imports=imports)
    assert words in said
    (tmp_path / "ckpt_7.pt").unlink()


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_predict_says_in_one_line_what_is_wrong_with_a_bin(tmp_path: Path) -> None:
    """torch's own message has twenty lines, and advises loading it all the same."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (model / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx\n")
    for content, words in (
        (
            _saved(_Runs()),
            "holds print, which is neither a tensor nor a plain container; none of it was executed",
        ),
        (b"\x80\x02garbage", "pytorch_model.bin"),
        (b"", "pytorch_model.bin"),
        (pickle.dumps(_Runs()), "pytorch_model.bin"),
    ):
        (model / "pytorch_model.bin").write_bytes(content)
        done = forked("stages.predict", model, "a [MASK]")
        assert done.returncode == 1, done.stdout
        errors = [line for line in done.stdout.splitlines() if line.strip()]
        assert len(errors) == 1, done.stdout
        assert errors[0].startswith("error: ")
        assert words in errors[0]
        assert "executed\n" not in done.stdout
        assert "weights_only" not in done.stdout


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.slow
def test_deep_json_is_refused_in_one_line(tmp_path: Path) -> None:
    """Python's reader gives up with a RecursionError, which is not a ValueError."""
    deep, model = "[" * 200_000, tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(deep)
    header = deep.encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (model / "vocab.txt").write_text("[PAD]\n")
    (tmp_path / "text.jsonl").write_text(deep)
    write(tmp_path / "x_test_0.hdf5")
    for module, *words in (
        ("stages.convert", "--inspect", model),
        ("stages.convert", model, tmp_path / "out"),
        ("stages.predict", model, "a [MASK]"),
        ("stages.evaluate", model, tmp_path, "--out", tmp_path / "out2"),
        ("trainer", "--data_dir", tmp_path, "--output_dir", tmp_path / "out3", "--model_config", model / "config.json"),
        ("stages.tokenize", "--source", tmp_path / "text.jsonl", "--out", tmp_path / "out4", "--processes", 1),
    ):
        done = forked(str(module), *words)
        assert done.returncode in (1, 2), done.stdout
        assert "Traceback" not in done.stdout, (module, done.stdout)
        assert "error: " in done.stdout


# Text.


def test_a_vocabulary_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "vocab.txt").open("wb") as file:
        file.truncate(3 << 30)
    (tmp_path / "text.txt").write_text("Some text.\n")
    said = refused_within(
        BOUND_BYTES, "stages.tokenize", "--source", tmp_path / "text.txt", "--vocab-file", tmp_path / "vocab.txt",
        "--out", tmp_path / "out", "--processes", 1, imports=("stages.tokens.wordpiece", "stages.tokens.vocabulary"),
    )  # fmt: skip
    assert "has 3,221,225,472 bytes, more than 67,108,864" in said


def test_an_archive_cannot_ask_for_a_large_window(tmp_path: Path) -> None:
    """An .xz file states the window that it needs, up to 4 GB: here 4 GB instead of 1 MB, with the right checksum."""
    folder = write(tmp_path / "in" / "x_training_0.hdf5").parent
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": MB}]
    packed = bytearray(lzma.compress(pack(folder, "").read_bytes(), filters=filters))
    (tmp_path / "good.tar.xz").write_bytes(packed + bytes(8) + packed)  # two streams and padding, as xz allows
    assert (
        forked("stages.download", tmp_path / "good.tar.xz", "--out", tmp_path / "good", "--processes", 1).returncode
        == 0
    )
    header = slice(12, 12 + 4 * packed[12])
    assert packed[14:16] == b"\x21\x01", "the filter, LZMA2, and the length of what it is told"
    packed[16] = 40
    packed[header.stop : header.stop + 4] = struct.pack("<L", zlib.crc32(packed[header]))
    (tmp_path / "bomb.tar.xz").write_bytes(packed)
    assert "Memory usage limit" in refused(tmp_path / "bomb.tar.xz", tmp_path / "out")
