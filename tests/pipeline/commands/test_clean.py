"""`python -m pipeline clean`: removes what nothing needs, and nothing else."""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import LockHeld
from pipeline.commands.clean import remove
from pipeline.status.stage_dirs import StageDirs
from stages.directory import manifest
from stages.directory.lock import hold
from tests.helpers.chain import Chain, finished_chain
from tests.helpers.support import assert_one_line_error, command, flip_a_byte


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A chain that has run to its end; tests that change it take a copy."""
    return finished_chain(tmp_path_factory)


def made(chain: Chain, *words: str) -> str:
    """The name of the directory that a run makes, or finds and links to again."""
    chain.run(*words)
    stage = {"ShardDataset": "shard_dataset-phase1", "TokenizeCorpus": "tokenize_corpus"}[words[0]]
    return chain.latest(stage).name


def needed(chain: Chain) -> set[str]:
    """All that the links in `latest/` need: their targets and, by the manifests, what those are made from."""
    names = {link.resolve().name for link in (chain.work / "latest").iterdir()}
    by_fingerprint = {}
    for path in chain.work.glob("*/stage.json"):
        by_fingerprint[json.loads(path.read_text())["fingerprint"]] = path.parent.name
    while True:
        records = [json.loads((chain.work / name / "stage.json").read_text()) for name in names]
        more = {by_fingerprint[up] for record in records for up in record["upstream"].values() if up in by_fingerprint}
        if more <= names:
            return names
        names |= more


def test_a_finished_chain_has_nothing_to_remove(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    before = copy.directories()
    assert copy.ask("clean", "--remove").stdout == "nothing is superseded\n"
    assert copy.directories() == before


def test_what_is_superseded_is_listed_and_removed_only_when_told(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    shards = ("ShardDataset", "--phase", "1", "--Dataset-dupe-factor")
    current = copy.latest("shard_dataset-phase1").name
    old, latest = made(copy, *shards, "2"), made(copy, *shards, "3")
    before = copy.directories()
    said = copy.ask("clean").stdout
    size = sum(path.stat().st_size for path in (copy.work / old).rglob("*") if path.is_file())
    readable = f"{size / 1000:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"
    assert f"superseded  {copy.work / old}: {readable}, made with other settings (dupe_factor: 2 → 1)" in said
    assert f"kept        {copy.work / latest}: latest/shard_dataset-phase1 points to it" in said
    assert f"{readable} in 1 directory; nothing was removed" in said
    assert current not in said
    assert copy.directories() == before
    said = copy.ask("clean", "--remove").stdout
    assert f"freed {readable}" in said
    assert before - copy.directories() == {old}
    assert not (copy.work / old).exists()


def test_the_settings_that_are_given_decide_what_is_current(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    shards = ("ShardDataset", "--phase", "1", "--Dataset-dupe-factor")
    old = copy.latest("shard_dataset-phase1").name
    new = made(copy, *shards, "2")
    # latest/pretrain-phase1 is made from the old one.
    assert "nothing is superseded" in copy.ask("clean", "--Dataset-dupe-factor", "2").stdout
    (copy.work / "latest" / "pretrain-phase1").unlink()
    assert "nothing is superseded" in copy.ask("clean", "--Dataset-dupe-factor", "2").stdout, (
        "convert_checkpoint is too"
    )
    for link in (copy.work / "latest").iterdir():
        if link.name not in ("tokenize_corpus", "shard_dataset-phase1"):
            link.unlink()
    gone = copy.ask("clean", "--Dataset-dupe-factor", "2", "--remove").stdout
    assert old in gone
    assert new in copy.directories()
    assert old not in copy.directories()


@pytest.mark.slow
def test_after_several_changes_of_settings_all_that_latest_needs_is_whole(chain: Chain, tmp_path: Path) -> None:
    """Also, the current settings and those of every link still find what they made."""
    copy = chain.copy(tmp_path / "copy")
    changes = [
        ("--Dataset-dupe-factor", "2"),
        ("--Corpus-vocab-size", "280"),
        ("--Corpus-vocab-size", "280", "--Dataset-dupe-factor", "3"),
        ("--Run-seed", "1"),
        ("--Run-seed", "2"),
    ]
    names = [made(copy, "ShardDataset", "--phase", "1", *change) for change in changes]
    assert len(set(names)) == len(changes)
    kept, before = needed(copy), copy.directories()
    copy.ask("clean", "--remove")
    after = copy.directories()
    assert kept <= after
    assert names[-1] in after
    assert set(names[:-1]) & after == set()
    assert len(before) > len(after)
    for link in (copy.work / "latest").iterdir():
        record = json.loads((link / "manifest.json").read_text())
        assert all((link / output["path"]).stat().st_size == output["bytes"] for output in record["outputs"])
    copy.ask("why", "ShardDataset", "--phase", "1", "--verify", *changes[-1])
    copy.ask("why", "BertPhase2", "--verify")
    assert "started" not in copy.run("BertPhase2").stderr


LABELS = ("tokenize_corpus", "shard_dataset-phase1", "pretrain-phase1", "convert_checkpoint", "merge_shards")


def made_up(work: Path, draw: random.Random) -> list[Path]:
    """A work directory of stages with real identities and records but made-up contents; some of them are unfinished."""
    places: list[tuple[Path, str]] = []
    for level, label in enumerate(LABELS):
        stage, _, phase = label.partition("-phase")
        before = [fingerprint for path, fingerprint in places if path.name.startswith(LABELS[level - 1])]
        for number in range(draw.randint(1, 3)):
            upstream = {"before": draw.choice(before)} if before else {}
            identity = manifest.Identity(stage, 1, int(phase) if phase else None, {"n": number}, {}, upstream)
            path = work / f"{label}-{identity.fingerprint[:10]}"
            path.mkdir(parents=True)
            manifest.claim(path, identity)
            (path / "output").mkdir()
            (path / "output" / "file").write_text("made")
            if draw.random() < 0.8:
                output = manifest.Output.of(path, path / "output" / "file")
                manifest.finish(path, identity, [output], {}, start=manifest.StartTime.now())
            places.append((path, identity.fingerprint))
    (work / "latest").mkdir()
    for label in LABELS:
        found = [path for path, _ in places if path.name.startswith(label) and (path / "manifest.json").exists()]
        if found and draw.random() < 0.6:
            (work / "latest" / label).symlink_to(Path("..") / draw.choice(found).name)
    return [path for path, _ in places]


def unlinked(work: Path) -> Path:
    """A stage of a made-up work directory that no link in `latest/` keeps."""
    place = made_up(work, random.Random(1))[0]
    for link in (work / "latest").iterdir():
        link.unlink()
    return place


def leave_nothing_made(place: Path) -> None:
    (place / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(place / "output")


@pytest.mark.parametrize("seed", range(12))
def test_of_any_work_directory_exactly_what_is_not_needed_goes(tmp_path: Path, seed: int) -> None:
    """Needed: what a link points to, what is being worked on, and everything that those were made from."""
    draw = random.Random(seed)
    chain = Chain(tmp_path)
    places = made_up(chain.work, draw)
    held = draw.sample(places, 1)
    unfinished = [path for path in places if not (path / "manifest.json").exists()]
    for path in {*held, *unfinished}:  # counts as linked while it is held or can be resumed
        (chain.work / "latest" / path.name).symlink_to(Path("..") / path.name)
    kept = needed(chain)
    for path in {*held, *unfinished}:
        (chain.work / "latest" / path.name).unlink()
    with ExitStack() as stack:
        for path in held:
            stack.enter_context(hold(path))
        listed = chain.ask("clean").stdout
        assert chain.directories() == {path.name for path in places}
        said = chain.ask("clean", "--remove").stdout
        assert chain.directories() == kept
        assert said.count("removed  ") == listed.count("superseded  ") == len(places) - len(kept)
        assert "superseded  " not in chain.ask("clean").stdout


def test_what_is_no_stage_directory_is_never_touched(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    superseded, linked, *others = made_up(chain.work, random.Random(0))
    for other in (*others, chain.work / "latest"):
        shutil.rmtree(other)
    record = (superseded / "stage.json").read_text()
    elsewhere = tmp_path / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    decoys = {
        "no_record-0123456789": "",
        "tokenize_corpus-0123456789": record,  # the record is for another fingerprint
        f"merge_shards{superseded.name[-11:]}": record,  # and this one for another stage
        f"{superseded.name}-backup": record,
        superseded.name.upper(): record,
        "notes": record,
    }
    for name, text in decoys.items():
        (chain.work / name).mkdir()
        if text:
            (chain.work / name / "stage.json").write_text(text)
    (chain.work / "evaluate-0123456789").write_text("a file")
    before = {path.name for path in chain.work.iterdir()}
    assert "freed" in chain.ask("clean", "--remove").stdout
    assert before - {path.name for path in chain.work.iterdir()} == {superseded.name}
    assert (elsewhere / "stage.json").exists()
    assert (elsewhere / "output" / "file").exists()


def test_what_another_user_keeps_to_himself_is_not_overlooked(tmp_path: Path) -> None:
    """A training whose record cannot be read may need what seems superseded: nothing goes."""
    chain = Chain(tmp_path)
    places = made_up(chain.work, random.Random(1))
    program = f"""
import sys
from pipeline.__main__ import main
from pipeline.status import stage_dirs
read = stage_dirs.read_manifest
def refused(path):
    if path.name == {places[0].name!r}:
        raise PermissionError(13, "Permission denied", str(path / "manifest.json"))
    return read(path)
stage_dirs.read_manifest = refused
sys.exit(main(["clean", "--remove"]))
"""
    done = command("-c", program, env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert_one_line_error(done, f"{places[0]} cannot be read, so it is not known what it needs", status=35)
    assert all((path / "stage.json").exists() for path in places)


def test_a_folder_is_removed_when_none_of_its_files_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps the name of an open file that was removed, so the folder would not be empty."""
    place = unlinked(tmp_path)
    (found,) = (one for one in StageDirs(tmp_path).all if one.path == place)
    remove_folder = Path.rmdir

    def rmdir(path: Path) -> None:
        fds = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        opened = [os.readlink(fd) for fd in fds if fd.is_symlink()]
        assert not [name for name in opened if name.startswith(f"{path}/")]
        remove_folder(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    remove(found, tmp_path)
    assert not place.exists()


def test_what_a_scheduler_was_given_is_no_result(tmp_path: Path) -> None:
    """Of a job that was cancelled before it made anything: nothing can be resumed, and nothing upstream is needed."""
    chain = Chain(tmp_path)
    place = unlinked(chain.work)
    leave_nothing_made(place)
    for name in ("job.sh", "job.yaml", "job-state.json"):
        (place / name).write_text("{}")
    assert f"superseded  {place}: " in chain.ask("clean").stdout


def test_what_has_become_needed_since_it_was_listed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the latest now, or a job works on it, without a lock here."""
    place = unlinked(tmp_path)
    (found,) = (one for one in StageDirs(tmp_path).all if one.path == place)
    (tmp_path / "latest" / found.label).symlink_to(Path("..") / place.name)
    with pytest.raises(LockHeld, match="is now the latest of its stage; it is kept"):
        remove(found, tmp_path)
    (tmp_path / "latest" / found.label).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.commands.clean.find_job", lambda _: SimpleNamespace(is_alive=lambda: True))
        with pytest.raises(LockHeld, match="is in use now by"):
            remove(found, tmp_path)
    assert (place / "stage.json").exists()
    remove(found, tmp_path)
    assert not place.exists()


def test_a_removal_that_was_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    """manifest.json is removed first and stage.json last, so that what is left is an unfinished stage with its name."""
    chain = Chain(tmp_path)
    place = unlinked(chain.work)
    leave_nothing_made(place)
    assert f"{place}: " in chain.ask("clean").stdout
    chain.ask("clean", "--remove")
    assert not place.exists()


def test_a_removal_that_is_killed_at_its_end_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = unlinked(tmp_path)
    (found,) = (one for one in StageDirs(tmp_path).all if one.path == place)
    removed, unlink = list[str](), Path.unlink

    def killed(path: Path, **options: bool) -> None:
        removed.append(path.name)
        if len(list(place.iterdir())) == 1:
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(found, tmp_path)
    assert removed[-1] == "stage.json"
    (again,) = (one for one in StageDirs(tmp_path).all if one.path == place)
    remove(again, tmp_path)
    assert not place.exists()


def test_with_an_input_missing_nobody_knows_what_is_needed_and_nothing_goes(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    shutil.rmtree(copy.work / "latest")
    (copy.directory / "corpus.txt").unlink()
    before = copy.directories()
    done = command("-m", "pipeline", "clean", "--remove", env={"LUIGI_CONFIG_PATH": str(copy.config)})
    assert_one_line_error(done, "corpus.txt matches no file", status=35)
    assert copy.directories() == before


def test_an_empty_work_directory_has_nothing_to_remove(tmp_path: Path) -> None:
    assert Chain(tmp_path).ask("clean").stdout == "nothing is superseded\n"


def test_checkpoints_that_were_set_aside_are_shown_listed_and_removed(chain: Chain, tmp_path: Path) -> None:
    """The newest is damaged: training resumes from the one before it, and sets the damaged one aside."""
    copy = chain.copy(tmp_path / "copy")
    directory = copy.latest("pretrain-phase1")
    flip_a_byte(directory / "checkpoints" / "ckpt_8" / "model-00-of-01.safetensors")
    (directory / "manifest.json").unlink()
    copy.run("Pretrain", "--phase", "1")
    aside = directory / "checkpoints" / "abandoned-1"
    assert (aside / "ckpt_8").is_dir()
    assert "set aside: ckpt_8" in copy.status()["pretrain-phase1"]["detail"]
    said = copy.ask("clean").stdout
    assert [line for line in said.splitlines() if line.startswith(f"set aside   {aside}: ")], said
    with hold(directory):
        assert str(aside) in copy.ask("clean", "--remove", status=1).stdout
    assert aside.exists()
    assert f"removed     {aside}" in copy.ask("clean", "--remove").stdout
    assert not aside.exists()
    assert copy.status()["pretrain-phase1"]["detail"] == ""
    assert copy.ask("clean").stdout == "nothing is superseded\n"


def test_an_interrupted_training_is_removed_only_by_name(tmp_path: Path, chain: Chain) -> None:
    copy = chain.copy(tmp_path / "copy")
    trained = copy.latest("pretrain-phase1")
    (trained / "manifest.json").unlink()
    (copy.work / "latest" / "pretrain-phase1").unlink()
    shutil.rmtree(copy.work / "latest")
    # With another learning rate, neither the training nor what was made from it is needed; the shards are.
    rate = ("--Phase1-lr", "5e-4")
    before = copy.directories()
    said = copy.ask("clean", "--remove", *rate).stdout
    (line,) = [line for line in said.splitlines() if line.startswith(f"interrupted {trained}: ")]
    assert line.endswith(f"interrupted at step 8; to remove it: --remove {trained.name}")
    gone = before - copy.directories()
    assert {name.rpartition("-")[0] for name in gone} >= {"convert_checkpoint", "pretrain-phase2", "report"}
    assert trained.name not in gone
    refused = command("-m", "pipeline", "clean", "--remove", "report-0", env={"LUIGI_CONFIG_PATH": str(copy.config)})
    assert_one_line_error(refused, "report-0 is neither superseded nor interrupted", status=35)
    assert "freed" in copy.ask("clean", "--remove", str(trained), *rate).stdout
    assert not trained.exists()


def test_what_an_interrupted_training_reads_stays_with_it(tmp_path: Path, chain: Chain) -> None:
    copy = chain.copy(tmp_path / "copy")
    (copy.latest("pretrain-phase1") / "manifest.json").unlink()
    needed_by_it = {copy.latest(name).name for name in ("pretrain-phase1", "shard_dataset-phase1", "tokenize_corpus")}
    shutil.rmtree(copy.work / "latest")
    copy.ask("clean", "--remove", "--Run-seed", "7")
    assert copy.directories() == needed_by_it
