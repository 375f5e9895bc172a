"""Complete stages in a store: pushed once, fetched whole and checked, or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import DiskError, UserError
from common.files import read_json
from common.secrets import Secret
from stages.directory.lock import hold
from stages.directory.manifest import IDENTITY as RECORD
from stages.directory.manifest import MANIFEST, Identity, Output, StageDirectory, claim, why_incomplete
from stages.store.backend import Altered, Backend
from stages.store.complete import fetch_stage, find_stage, is_marked, push_stage
from stages.store.files import NotUsable
from stages.store.open import open_store
from stages.store.options import StoreOptions
from stages.store.records import StageRecord, StoredFile, seal, stage_key
from tests.conftest import Disk
from tests.helpers.support import assert_one_line_error, command

IDENTITY = Identity("shard_dataset", 1, 1, {"seed": 1})
LABEL, FINGERPRINT = "shard_dataset-phase1", IDENTITY.fingerprint
FILES = {"a.hdf5": b"first" * 1000, "deep/b.hdf5": b"second" * 1000, "same.hdf5": b"first" * 1000, "empty": b""}


def make(directory: Path, identity: Identity = IDENTITY, files: dict[str, bytes] = FILES) -> Path:
    """Make a complete stage."""
    with StageDirectory.begin(directory, lambda: identity) as work:
        for name, data in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        (directory / "metrics.jsonl").write_text('{"step": 1}\n')
        work.finish([Output.of(directory, directory / name) for name in files], {"rows": 3})
    return directory


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make(tmp_path / "here/shard_dataset-phase1-0123456789")


def fetch(backend: Backend, directory: Path, **options: object) -> None:
    record = find_stage(backend, LABEL, FINGERPRINT)
    assert record is not None
    directory.mkdir(parents=True, exist_ok=True)
    fetch_stage(backend, record, directory, **options)  # type: ignore[arg-type]


def test_a_stage_comes_back_whole(backend: Backend, made: Path, tmp_path: Path) -> None:
    assert find_stage(backend, LABEL, FINGERPRINT) is None
    push_stage(backend, made, LABEL)
    there = tmp_path / "there"
    fetch(backend, there)
    assert why_incomplete(there, FINGERPRINT, verify=True) is None
    for name in (*FILES, MANIFEST, "stage.json", "metrics.jsonl"):
        assert (there / name).read_bytes() == (made / name).read_bytes(), name
    assert is_marked(made, backend.url)
    assert is_marked(there, backend.url)
    assert not is_marked(there, "s3://another")
    assert not list(there.rglob("*.tmp"))


def test_what_the_store_has_is_not_sent_again(
    backend: Backend, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_stage(backend, made, LABEL)
    before = {entry.key for entry in backend.list("objects/")}
    sent: list[str] = []
    upload = backend.upload
    monkeypatch.setattr(backend, "upload", lambda key, *rest: (sent.append(key), upload(key, *rest)))
    other = Identity("shard_dataset", 1, 1, {"seed": 2})
    push_stage(backend, make(tmp_path / "other", other, {**FILES, "new.hdf5": b"new"}), LABEL)
    assert len(sent) == 3  # the new file, stage.json and the manifest
    assert not before & set(sent)
    # In the first stage, "a.hdf5" and "same.hdf5" are one object.
    assert sum(key.startswith("objects/") for key in before) == len(FILES) - 1 + len(
        ("stage.json", "metrics", "manifest")
    )
    sent.clear()
    push_stage(backend, made, LABEL)
    assert sent == []


def test_files_that_are_there_already_are_not_fetched(
    backend: Backend, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_stage(backend, made, LABEL)
    there = tmp_path / "there"
    (there / "deep").mkdir(parents=True)
    for name in ("a.hdf5", "same.hdf5"):
        (there / name).write_bytes(FILES[name])
    (there / "deep/b.hdf5").write_bytes(FILES["deep/b.hdf5"][::-1])  # of the same size
    fetched: list[str] = []
    download = backend.download
    monkeypatch.setattr(backend, "download", lambda key, *rest: (fetched.append(key), download(key, *rest)))
    fetch(backend, there)
    assert why_incomplete(there, FINGERPRINT, verify=True) is None
    by_path = {output["path"]: output["sha256"] for output in json.loads((made / MANIFEST).read_bytes())["outputs"]}
    assert any(key.endswith(by_path["deep/b.hdf5"]) for key in fetched)
    assert not any(key.endswith(by_path["a.hdf5"]) for key in fetched)


@pytest.mark.parametrize("name", ["a.hdf5", MANIFEST, "stage.json"])
@pytest.mark.parametrize("damage", ["other bytes", "shorter", "gone"])
def test_a_poisoned_object_is_refused(backend: Backend, made: Path, tmp_path: Path, name: str, damage: str) -> None:
    record = push_stage(backend, made, LABEL)
    (key,) = {file.key for file in record.files if file.path == name}
    path = tmp_path / "store" / key
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[::-1] if damage == "other bytes" else data[:-1])
    with pytest.raises(NotUsable, match="is missing" if damage == "gone" else "bytes do not match the sha256"):
        fetch(backend, tmp_path / "there")
    assert not (tmp_path / "there" / MANIFEST).exists()
    assert not (tmp_path / "there" / name).exists()


@pytest.mark.parametrize(
    "path",
    ["../outside", "/etc/outside", "deep/../../outside", "../sibling/../../outside", "..", "", "a\0b", "../other/x"],
)
def test_a_record_cannot_put_files_elsewhere(backend: Backend, made: Path, tmp_path: Path, path: str) -> None:
    record = push_stage(backend, made, LABEL)
    first, *rest = record.files
    evil = StageRecord(LABEL, FINGERPRINT, (StoredFile(path, first.bytes, first.sha256), *rest), "", "")
    (tmp_path / "store" / record.key).write_bytes(evil.encode())
    with pytest.raises(NotUsable, match="outside its directory"):
        fetch(backend, tmp_path / "work/there", siblings=("sibling",))
    assert not list(tmp_path.rglob("outside"))


def test_a_manifest_of_another_stage_is_refused(backend: Backend, made: Path, tmp_path: Path) -> None:
    ours = push_stage(backend, made, LABEL)
    other = Identity("shard_dataset", 1, 1, {"seed": 2})
    theirs = push_stage(backend, make(tmp_path / "other", other), LABEL)
    swapped = StageRecord(LABEL, FINGERPRINT, theirs.files, "", "")
    (tmp_path / "store" / ours.key).write_bytes(swapped.encode())
    with pytest.raises(NotUsable, match="its manifest is for something else"):
        fetch(backend, tmp_path / "there")
    fewer = StageRecord(LABEL, FINGERPRINT, ours.files[1:], "", "")  # one output is not among its files
    (tmp_path / "store" / ours.key).write_bytes(fewer.encode())
    with pytest.raises(NotUsable, match="its manifest is for something else"):
        fetch(backend, tmp_path / "there")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"content": {"format": 1}, "sha256": "0"}',
        seal({"label": LABEL, "fingerprint": "0" * 64, "files": []}),
        seal({"label": LABEL, "fingerprint": FINGERPRINT}),
        seal({"label": LABEL, "fingerprint": FINGERPRINT, "files": []}),
        seal({"label": LABEL, "fingerprint": FINGERPRINT, "files": 5}),
        seal({"label": LABEL, "fingerprint": FINGERPRINT, "files": [{"path": "x"}]}),
        seal({"label": LABEL, "fingerprint": FINGERPRINT, "files": [{"path": "x", "bytes": -1, "sha256": "0" * 64}]}),
        seal({"label": LABEL, "fingerprint": FINGERPRINT, "files": [{"path": "x", "bytes": 1, "sha256": "../x"}]}),
    ],
)
def test_a_damaged_record_counts_as_none_and_the_next_push_mends_it(
    backend: Backend, made: Path, tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    push_stage(backend, made, LABEL)
    (tmp_path / "store" / stage_key(LABEL, FINGERPRINT)).write_bytes(data)
    assert find_stage(backend, LABEL, FINGERPRINT) is None
    assert "is damaged" in capsys.readouterr().err
    push_stage(backend, made, LABEL)
    fetch(backend, tmp_path / "there")


def test_only_whole_stages_are_pushed(backend: Backend, made: Path) -> None:
    (made / "deep/b.hdf5").write_bytes(FILES["deep/b.hdf5"][::-1])  # same size: complete according to its manifest
    with pytest.raises(UserError, match=r"b\.hdf5 no longer matches its manifest; it is not pushed"):
        push_stage(backend, made, LABEL)
    (made / "a.hdf5").unlink()
    with pytest.raises(UserError, match=r"is not complete \(.*a\.hdf5 is missing\); only complete stages are pushed"):
        push_stage(backend, made, LABEL)
    (made / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"is not complete \(never finished\)"):
        push_stage(backend, made, LABEL)
    assert find_stage(backend, LABEL, FINGERPRINT) is None


def test_an_object_of_another_length_is_sent_again(backend: Backend, made: Path, tmp_path: Path) -> None:
    """As copying a store to another place may leave it."""
    record = push_stage(backend, made, LABEL)
    stored = tmp_path / "store" / record.files[0].key
    stored.write_bytes(b"cut")
    push_stage(backend, made, LABEL)
    assert stored.stat().st_size == record.files[0].bytes
    fetch(backend, tmp_path / "there")


def test_all_that_is_altered_is_named(backend: Backend, made: Path, tmp_path: Path) -> None:
    record = push_stage(backend, made, LABEL)
    keys = {file.key for file in record.files if file.path in ("a.hdf5", "deep/b.hdf5")}
    for key in keys:
        path = tmp_path / "store" / key
        path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(NotUsable) as refused:
        fetch(backend, tmp_path / "there")
    assert set(refused.value.altered) == keys
    backend.delete(refused.value.altered)
    push_stage(backend, made, LABEL)
    fetch(backend, tmp_path / "another")


def test_a_directory_is_pushed_twice_at_once(
    backend: Backend, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a second luigi runs in the same work directory while the first waits for its pushes."""
    upload = backend.upload

    def slowly(*what: Any) -> None:
        time.sleep(0.1)
        upload(*what)

    monkeypatch.setattr(backend, "upload", slowly)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: push_stage(backend, made, LABEL), range(3)))
    fetch(backend, tmp_path / "there")


def test_two_machines_push_the_same_stage_at_once(backend: Backend, made: Path, tmp_path: Path) -> None:
    copies = [shutil.copytree(made, tmp_path / f"machine{number}") for number in range(6)]
    for number, copy in enumerate(copies):  # the same result, made at another time
        manifest = json.loads((copy / MANIFEST).read_bytes())
        (copy / MANIFEST).write_text(json.dumps({**manifest, "seconds": number}))
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda copy: push_stage(backend, copy, LABEL), copies))
    fetch(backend, tmp_path / "there")
    assert (tmp_path / "there" / MANIFEST).read_bytes() in [(copy / MANIFEST).read_bytes() for copy in copies]


def test_a_file_beside_the_stage_and_the_time_of_a_linked_input_come_along(backend: Backend, tmp_path: Path) -> None:
    directory = tmp_path / "here/report-0123456789"
    (tmp_path / "here/merge-1").mkdir(parents=True)
    (tmp_path / "here/merge-1/README.md").write_text("card")
    with StageDirectory.begin(directory, lambda: IDENTITY) as work:
        (directory / "linked").write_bytes(b"data")
        os.utime(directory / "linked", ns=(1, 123456789))
        output = Output("linked", 4, Output.of(directory, directory / "linked").sha256, mtime_ns=123456789)
        work.finish([output], {}, present=["../merge-1/README.md"])
    record = push_stage(backend, directory, LABEL)
    assert record.beside == {"merge-1"}
    name = f"{LABEL}-{FINGERPRINT[:10]}"
    pull = ("-m", "stages.sync", "pull", name, f"--store={tmp_path / 'store'}", f"--work-dir={tmp_path / 'work'}")
    (tmp_path / "work").mkdir()
    assert_one_line_error(command(*pull), f"{name} puts files into merge-1, which is not here; pull that first")
    (tmp_path / "work/merge-1").mkdir()
    assert command(*pull).returncode == 0
    assert (tmp_path / "work/merge-1/README.md").read_text() == "card"
    fetch(backend, tmp_path / "there/report-0123456789", siblings=("merge-1",))
    assert why_incomplete(tmp_path / "there/report-0123456789", FINGERPRINT) is None
    assert (tmp_path / "there/merge-1/README.md").read_text() == "card"
    # Somebody has edited the card, and the report is fetched again.
    (tmp_path / "there/merge-1/README.md").write_text("edited")
    shutil.rmtree(tmp_path / "there/report-0123456789")
    fetch(backend, tmp_path / "there/report-0123456789", siblings=("merge-1",))
    assert (tmp_path / "there/merge-1/README.md").read_text() == "edited"
    # A record with a file next to the stage that its manifest does not know.
    other = dataclasses.replace(record.files[0], path="../merge-1/manifest.json")
    with pytest.raises(NotUsable, match=r"its manifest does not name \.\./merge-1/manifest\.json"):
        fetch_stage(
            backend, dataclasses.replace(record, files=(other, *record.files)), tmp_path / "there/again",
            siblings=("merge-1",),
        )  # fmt: skip
    assert [path.name for path in (tmp_path / "there/merge-1").iterdir()] == ["README.md"]


def test_what_is_altered_on_its_way_is_fetched_again(
    backend: Backend, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not removed from the store for that."""
    record = push_stage(backend, made, LABEL)
    whole, cut = backend.download, set[str]()

    def download(key: str, *rest: Any) -> None:
        if key not in cut:
            cut.add(key)
            raise Altered(key)
        whole(key, *rest)

    monkeypatch.setattr(backend, "download", download)
    fetch(backend, tmp_path / "there")
    assert cut == {file.key for file in record.files}
    assert why_incomplete(tmp_path / "there", FINGERPRINT, verify=True) is None


def test_of_several_stages_those_that_are_here_are_passed_over(backend: Backend, made: Path, tmp_path: Path) -> None:
    push_stage(backend, made, LABEL)
    other = Identity("shard_dataset", 1, 1, {"seed": 2})
    push_stage(backend, make(tmp_path / "here/other", other), LABEL)
    names = [f"{LABEL}-{fingerprint[:10]}" for fingerprint in (FINGERPRINT, other.fingerprint)]
    words = ("-m", "stages.sync", "pull", f"--store={tmp_path / 'store'}", f"--work-dir={tmp_path / 'work'}")
    (tmp_path / "work").mkdir()
    assert command(*words, names[0]).returncode == 0
    done = command(*words, *names)
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert why_incomplete(tmp_path / "work" / names[1], other.fingerprint, verify=True) is None


def test_a_full_disk_while_pushing_is_one_error(backend: Backend, disk: Disk) -> None:
    """Files that may still grow are copied before they are pushed."""
    made = make(disk.path / "made")
    (made / "metrics.jsonl").write_bytes(b"x" * 300_000)
    used = sum(path.stat().st_size for path in made.rglob("*"))
    disk.resize(used // 1024 + 150)
    with pytest.raises(DiskError, match="No space left on device"):
        push_stage(backend, made, LABEL)
    assert not list(made.glob("push*.tmp"))
    disk.resize(64 << 10)
    push_stage(backend, made, LABEL)


@pytest.mark.parametrize(
    ("verb", "point"),
    [
        ("push", "store-uploaded"),
        ("push", "store-record"),
        ("push", f"store-rename:{FINGERPRINT}.json"),
        ("pull", "store-fetched-identity"),
        ("pull", "store-downloaded"),
        ("pull", "store-fetched"),
    ],
)
def test_the_command_goes_on_after_a_kill(made: Path, tmp_path: Path, verb: str, point: str) -> None:
    """And whoever makes the stage recognises what a killed one has left."""
    store, work = f"--store={tmp_path / 'store'}", tmp_path / "work"
    words = ("-m", "stages.sync", "push", str(made), store)
    pull = ("-m", "stages.sync", "pull", f"{LABEL}-{FINGERPRINT[:10]}", f"--work-dir={work}", store)
    if verb == "pull":
        assert command(*words).returncode == 0
        work.mkdir()
        words = pull
    assert command(*words, env={"FAILPOINT": point}).returncode == -9
    for left in work.glob("*") if verb == "pull" else ():
        claimed = shutil.copytree(left, tmp_path / "claimed")
        with hold(claimed):
            claim(claimed, Identity.of_record(read_json(made / RECORD) or {}))
    again = command(*words)
    assert again.returncode == 0, again.stderr
    done = command(*pull)
    assert done.returncode == 0, done.stderr
    assert why_incomplete(work / f"{LABEL}-{FINGERPRINT[:10]}", FINGERPRINT, verify=True) is None
    assert "is complete already" in done.stdout or verb == "push"


def test_the_command_refuses_in_one_line(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words, expected in (
        (("push", str(tmp_path / "nothing"), "--store=store"), "is not a stage directory: it has no stage.json"),
        (("push", str(made), f"--store={tmp_path / 'file'}"), "is a file; give a folder, or s3://bucket/prefix"),
        (("push", str(made), "--store=ftp://host/x"), "ftp:// is unknown; allowed: s3://, file:// and plain paths"),
        (("push", str(made), "--store=x", "--kms-key=k"), "needs encryption = aws:kms"),
        (("push", str(made), "--store=x", "--encryption=AES256"), "is for a store in S3; leave it empty"),
        (("pull", f"{LABEL}-77", f"--store={tmp_path / 'empty'}"), f"has no stage {LABEL}-77"),
    ):
        assert_one_line_error(command("-m", "stages.sync", *words), expected)


def test_a_failed_fetch_shows_no_progress_any_more(backend: Backend, made: Path, tmp_path: Path) -> None:
    """`status` would show it for ever."""
    record, _ = push_stage(backend, made, LABEL), (tmp_path / "work").mkdir()
    for file in record.files[:-1]:  # the last is the manifest, which is fetched first
        (tmp_path / "store" / file.key).write_bytes(b"?" * file.bytes)
    pull = ("-m", "stages.sync", "pull", f"{LABEL}-{FINGERPRINT[:10]}", f"--work-dir={tmp_path / 'work'}")
    assert_one_line_error(command(*pull, f"--store={tmp_path / 'store'}"), "store verify --remove")
    assert not list((tmp_path / "work").rglob("progress.json"))


def test_a_full_disk_leaves_no_complete_stage(made: Path, tmp_path: Path, disk: Disk) -> None:
    store = f"--store={tmp_path / 'store'}"
    assert command("-m", "stages.sync", "push", str(made), store).returncode == 0
    disk.resize(8)
    pull = ("-m", "stages.sync", "pull", f"{LABEL}-{FINGERPRINT[:10]}", f"--work-dir={disk.path}", store)
    done = command(*pull)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    disk.resize(4096)
    assert command(*pull).returncode == 0
