"""`python -m pipeline publish`: a folder or a prefix in S3 holds the whole model or none, and transformers gives the
same answers from it as from the original."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.store.publish_s3 import S3Prefix
from tests.helpers.chain import Chain
from tests.helpers.stores.hub import card_errors
from tests.helpers.stores.s3 import S3, error
from tests.helpers.support import assert_one_line_error, command, flip_a_byte
from tests.stages.store.conftest import Bucket

FILES = {
    "README.md", "config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.txt",
}  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def answers(folder: Path) -> list[Any]:
    """What transformers' own pipeline fills into masks."""
    transformers = pytest.importorskip("transformers")
    fill = transformers.pipeline("fill-mask", model=str(folder), device="cpu")
    texts = ("The [MASK] is here.", "People [MASK] the school and the country.")
    return [[(one["token_str"], one["score"]) for one in fill(text, top_k=10)] for text in texts]


def refused(chain: Chain, *words: object, **env: str) -> str:
    """The one line with which it refuses."""
    done = command(
        "-m", "pipeline", "publish", *map(str, words), env={"LUIGI_CONFIG_PATH": str(chain.config), **env}
    )  # fmt: skip
    assert_one_line_error(done, status=35)
    return next(line for line in done.stderr.splitlines() if line.startswith("error: "))


def test_a_published_folder_answers_as_the_original(chain: Chain, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "published"
    said = chain.ask("publish", str(folder)).stdout
    assert f"{folder} has " in said
    found = content(folder)
    assert set(found) == FILES
    assert {name: found[name] for name in FILES - {"README.md"}} == {
        name: data for name, data in content(model).items() if name != "README.md"
    }
    assert answers(folder) == answers(model)
    assert [path.name for path in folder.parent.iterdir()] == ["published"]


def test_the_card_has_the_metadata_that_the_hub_asks_for(chain: Chain, tmp_path: Path) -> None:
    """Read by huggingface_hub's classes and as YAML; checked against the Hub's documentation."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    words = ("--Card-license", "cc-by-sa-4.0", "--Card-language", "en de", "--Card-datasets", "wikimedia/wikipedia")
    chain.ask("publish", str(tmp_path / "published"), *words)
    text = (tmp_path / "published" / "README.md").read_text()
    card = huggingface_hub.ModelCard.load(tmp_path / "published" / "README.md")
    assert card_errors(text) == []
    data = yaml.safe_load(text.split("---\n")[1])
    assert data == card.data.to_dict()
    assert (data["license"], data["language"], data["datasets"]) == (
        "cc-by-sa-4.0",
        ["en", "de"],
        ["wikimedia/wikipedia"],
    )
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "fill-mask")
    evaluated: Any = chain.manifest("evaluate")["counts"]
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results["masked-LM accuracy"] == pytest.approx(evaluated["masked_lm_accuracy"], rel=1e-5)
    assert results["next-sentence loss"] == pytest.approx(evaluated["next_sentence_loss"], rel=1e-5)
    assert str(chain.directory) not in text
    assert "corpus.txt" in text


def test_a_card_that_was_edited_is_published_as_it_is(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    card = copy.latest("merge_shards") / "model" / "README.md"
    card.write_text("---\nlicense: mit\n---\n\n# Mine\n")
    done = copy.ask("publish", str(tmp_path / "published"))
    assert "edited by hand, so it is published as it is" in done.stderr
    assert (tmp_path / "published" / "README.md").read_text() == card.read_text()
    for broken in ("license: [mit", "just words", "model-index: 3"):
        card.write_text(f"---\n{broken}\n---\n\n# Mine\n")
        assert f"{card}: the metadata at its beginning cannot be read (" in refused(copy, tmp_path / "published")


def test_a_dry_run_lists_what_would_go_and_writes_nothing(chain: Chain, tmp_path: Path) -> None:
    for target in (str(tmp_path / "published"), "hf://org/name", "s3://bucket/prefix"):
        env = {"HF_TOKEN": "hf_of_nobody", "AWS_EC2_METADATA_DISABLED": "true"}
        said = chain.ask("publish", target, "--dry-run", **env).stdout
        assert {line.split()[-1] for line in said.splitlines()[:-1]} == FILES
        assert f"{target} would get " in said.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_another_model_is_published_with_the_card_of_its_records(chain: Chain, model: Path, tmp_path: Path) -> None:
    chain.ask("publish", str(tmp_path / "a"), "--model", str(chain.latest("merge_shards")), "--Phase1-lr", "0.5")
    text = (tmp_path / "a" / "README.md").read_text()
    assert card_errors(text) == []
    assert "held-out examples" in text
    # What was published can be published again, from elsewhere, with its existing card.
    chain.ask("publish", str(tmp_path / "b"), "--model", str(tmp_path / "a"))
    assert content(tmp_path / "b") == content(tmp_path / "a")


@pytest.mark.slow
def test_killed_anywhere_a_folder_is_the_old_or_the_new_one(chain: Chain, tmp_path: Path) -> None:
    folder, log = tmp_path / "published", tmp_path / "points"
    chain.ask("publish", str(folder), FAILPOINT="none", FAILPOINT_LOG=str(log))
    names = [name for name in log.read_text().split() if name.startswith(("publish:", "rename-"))]
    assert len(names) == len(FILES) + 2
    new = content(folder)
    shutil.rmtree(folder)
    env = {"LUIGI_CONFIG_PATH": str(chain.config)}
    for before in ({}, {**new, "config.json": b"{}", "model-00001-of-00002.safetensors": b"old"}):
        for name in names:
            if before:
                folder.mkdir()
                for file, data in before.items():
                    (folder / file).write_bytes(data)
            done = command("-m", "pipeline", "publish", str(folder), env={**env, "FAILPOINT": name})
            assert done.returncode == -signal.SIGKILL, done.stderr
            found = content(folder) if folder.exists() else {}
            assert found == (new if name.startswith("rename-after") else before), name
            chain.ask("publish", str(folder))
            assert content(folder) == new, name
            assert not list(tmp_path.glob("*.tmp")), name
            shutil.rmtree(folder)


def test_a_folder_that_has_lost_its_name_gets_it_back(chain: Chain, tmp_path: Path) -> None:
    """Where two folders cannot exchange their names in one step, a killed run leaves the old one so."""
    folder = tmp_path / "published"
    chain.ask("publish", str(folder))
    new = content(folder)
    folder.rename(tmp_path / "published.replaced")
    chain.ask("publish", str(folder))
    assert content(folder) == new
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_a_folder_with_other_things_is_left_alone(chain: Chain, model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    assert "home holds thesis.txt, which is not part of a published model" in refused(chain, tmp_path / "home")
    assert (tmp_path / "home" / "thesis.txt").exists()
    assert "thesis.txt is a file; give a folder" in refused(chain, tmp_path / "home" / "thesis.txt")
    assert "holds the model that is to be published" in refused(chain, model)
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "mine.tmp" / "thesis.txt").write_text("years of work")
    assert "mine.tmp holds thesis.txt" in refused(chain, tmp_path / "mine")
    (tmp_path / "busy.tmp").mkdir()
    descriptor = os.open(tmp_path / "busy.tmp", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert f"another process is publishing to {tmp_path / 'busy'};" in refused(chain, tmp_path / "busy")
    os.close(descriptor)
    chain.ask("publish", str(tmp_path / "busy"))
    # If the folder is a link, what it points to is replaced.
    (tmp_path / "latest").symlink_to("busy")
    (tmp_path / "busy" / "config.json").write_text("{}")
    chain.ask("publish", str(tmp_path / "latest"))
    assert (tmp_path / "latest").is_symlink()
    assert content(tmp_path / "latest").keys() == FILES
    assert (tmp_path / "latest" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_bad_input_is_one_line(chain: Chain, tmp_path: Path) -> None:
    assert "ftp:// is unknown; allowed: hf://org/name, s3://bucket/prefix, or a folder" in refused(chain, "ftp://x/y")
    assert "is the root of the file system; give a folder in it" in refused(chain, "/")
    assert "--private is for the Hub" in refused(chain, tmp_path / "x", "--private")
    assert "has no config.json; give a Hugging Face directory" in refused(chain, tmp_path / "x", "--model", tmp_path)
    assert "is not a place in S3; write s3://bucket/prefix" in refused(chain, "s3://")
    line = refused(chain, tmp_path / "x", "--Phase1-lr", "0.5")
    assert "the model of these settings is not usable: never started; run `luigi --module pipeline BertPhase2`" in line
    assert "license = A! is not allowed" in refused(chain, tmp_path / "x", "--Card-license", "A!")


def test_a_model_that_nobody_could_use_is_refused(chain: Chain, model: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(model, foreign)
    (foreign / "README.md").unlink()
    words = (tmp_path / "x", "--model", foreign)
    assert "has no README.md, and nothing there tells how the model was made" in refused(chain, *words)
    (foreign / "README.md").write_text("# Mine")
    (foreign / "tokenizer.json").unlink()
    assert "has no tokenizer.json, without which nobody can use it" in refused(chain, *words)
    (foreign / "model.safetensors").rename(foreign / "pytorch_model.bin")
    assert "has no model.safetensors; publish takes no other format" in refused(chain, *words)
    copy = chain.copy(tmp_path / "copy")
    flip_a_byte(copy.latest("merge_shards") / "model" / "model.safetensors")
    line = refused(copy, tmp_path / "x")
    assert "is not usable" in line
    assert "model.safetensors was altered: its sha256 is not the manifest's" in line
    assert not (tmp_path / "x").exists()


# S3: moto's server.


def to(bucket: Bucket, s3: S3, prefix: str = "runs/store/bert") -> tuple[str, ...]:
    return (f"s3://{bucket.name}/{prefix}", "--Store-s3-endpoint", s3.url)


def test_a_published_prefix_has_the_same_files_and_is_encrypted(
    chain: Chain, model: Path, s3: S3, bucket: Bucket, tmp_path: Path
) -> None:
    chain.ask("publish", *to(bucket, s3), "--Store-encryption", "AES256")
    assert set(bucket.keys()) == {f"bert/{name}" for name in FILES}
    folder = tmp_path / "fetched"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes(bucket.get(f"bert/{name}"))
        assert bucket.head(f"bert/{name}")["ServerSideEncryption"] == "AES256"
    assert answers(folder) == answers(model)
    puts = [request.path.rpartition("/")[2] for request in s3.requests if request.operation == "put_object"]
    assert puts[-1] == "config.json"


@pytest.mark.slow
def test_killed_anywhere_a_prefix_does_not_look_whole(chain: Chain, s3: S3, bucket: Bucket) -> None:
    """The old model there, of two files, is gone by then; files that belong to no model stay."""
    others = dict.fromkeys(
        ("bert/notes.txt", "bert/checkpoints/model.safetensors", "bert/model-b/config.json"), b"mine"
    )
    others["bert/model-b/model.safetensors"] = b"mine"  # fnmatch's * would match the slash
    env = {"LUIGI_CONFIG_PATH": str(chain.config)}
    for name in sorted(FILES):
        old = ("bert/config.json", "bert/model-00001-of-00002.safetensors", "bert/model-00002-of-00002.safetensors")
        for key, data in {**dict.fromkeys(old, b"old"), **others}.items():
            bucket.put(key, data)
        done = command("-m", "pipeline", "publish", *to(bucket, s3), env={**env, "FAILPOINT": f"publish:{name}"})
        assert done.returncode == -signal.SIGKILL, done.stderr
        found = bucket.keys()
        assert ("bert/config.json" in found) == (name == "config.json")
        chain.ask("publish", *to(bucket, s3))
        assert set(bucket.keys()) == {f"bert/{name}" for name in FILES} | set(others)
    assert bucket.get("bert/notes.txt") == b"mine"


def test_what_s3_refuses_is_one_line(chain: Chain, s3: S3, bucket: Bucket) -> None:
    line = refused(chain, "s3://no-such-bucket-here/x", "--Store-s3-endpoint", s3.url)
    assert "there is no bucket no-such-bucket-here" in line
    s3.fail(error(403, "AccessDenied"), "put_object", times=10)
    assert "access is denied" in refused(chain, *to(bucket, s3))


def test_a_large_file_goes_on_with_the_parts_that_are_there(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    from stages.store.publish import Publication

    data = os.urandom(450_000)
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    files = {name: tmp_path / name for name in ("model.safetensors", "config.json")}
    publication = Publication(files, ("*.safetensors", "config.json"))
    s3.fail(error(403, "AccessDenied"), lambda request: request.query.get("partNumber") == "5")
    with pytest.raises(Exception, match="access is denied"):
        S3Prefix(bucket.options).publish(publication, lambda moved: None)
    sent = s3.count("upload_part")
    moved: list[int] = []
    S3Prefix(bucket.options).publish(publication, moved.append)
    assert s3.count("upload_part") - sent < 5
    assert bucket.get("model.safetensors") == data
    assert sum(moved) == len(data) + 2
    assert json.loads(bucket.get("config.json")) == {}
