"""`python -m pipeline publish hf://org/name`: the real `huggingface_hub` talks to a stand-in for the Hub on this
machine (tests/helpers/stores/hub.py), by LFS and by Xet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.process import free_port
from tests.helpers.chain import Chain, wait_until
from tests.helpers.stores.hub import NO_COMPRESSION, READER, WRITER, Handler, Hub, Repository, serving
from tests.helpers.support import ROOT, assert_one_line_error

pytest.importorskip("huggingface_hub")
NAME = "org/bert-mini"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as found:
        yield found


class Publisher:
    """The command, without any user's login. Not forked: the library reads its environment when it is imported."""

    def __init__(self, chain: Chain, home: Path) -> None:
        self.words = [sys.executable, "-m", "pipeline", "publish"]
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        self.env |= {"LUIGI_CONFIG_PATH": str(chain.config), "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        self.env |= {"HF_HUB_DISABLE_XET": "1"}

    def __call__(self, *words: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.words, *words], cwd=ROOT, env={**self.env, **env}, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        for secret in (WRITER, READER):
            assert secret not in done.stdout + done.stderr
        return done

    def python(self, program: str, **env: str) -> str:
        """The output of a program."""
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=True,
        ).stdout


@pytest.fixture
def publish(chain: Chain, tmp_path: Path) -> Publisher:
    return Publisher(chain, tmp_path / "hf-home")


def has_model(repository: Repository, model: Path) -> None:
    """Check that all files of the model are there, and a card."""
    published = {name: data for name, data in repository.files.items() if name not in (".gitattributes", "README.md")}
    assert published == {path.name: path.read_bytes() for path in model.iterdir() if path.name != "README.md"}
    assert b"\npipeline_tag: fill-mask\n" in repository.files["README.md"]


@pytest.mark.parametrize("way", ["lfs", "lfs in parts", "xet"])
def test_what_is_published_is_fetched_again_and_answers_the_same(
    publish: Publisher, chain: Chain, model: Path, tmp_path: Path, way: str
) -> None:
    if way == "xet":
        pytest.importorskip("hf_xet")
        publish.env |= {"HF_HUB_DISABLE_XET": "", **NO_COMPRESSION}
    with serving(20_000 if way == "lfs in parts" else None) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER}
        done = publish(f"hf://{NAME}", **env)
        assert f"hf://{NAME} has " in done.stdout
        has_model(hub.repositories[NAME], model)
        assert hub.repositories[NAME].commits == ["initial commit", "Publish the model"]
        assert hub.count("POST", "xorbs") == (way == "xet")
        assert hub.count("PUT", r"/lfs/\w+/\d+") == (4 if way == "lfs in parts" else 0)
        fetch = f"import huggingface_hub as h; print(h.snapshot_download('{NAME}', local_dir='{tmp_path / 'fetched'}'))"
        publish.python(fetch, HF_ENDPOINT=hub.url)
    import transformers

    fill, original = (
        transformers.pipeline("fill-mask", model=str(folder), device="cpu") for folder in (tmp_path / "fetched", model)
    )
    text = "The [MASK] is here."
    assert fill(text, top_k=10) == original(text, top_k=10)
    assert f'from_pretrained("{NAME}")' in (tmp_path / "fetched" / "README.md").read_text()


def test_the_hubs_validator_takes_the_card_and_refuses_another(
    publish: Publisher, hub: Hub, tmp_path: Path, model: Path
) -> None:
    """`ModelCard.validate` asks the Hub: here the stand-in, which follows the rules of the Hub's documentation."""
    publish(str(tmp_path / "published"))
    validate = "import sys, huggingface_hub as h; h.ModelCard.load(sys.argv[1]).validate(); print('valid')"
    for text, is_valid in (("pipeline_tag: fill-mask", True), ("pipeline_tag: fill-maks", False)):
        card = tmp_path / "README.md"
        whole = (tmp_path / "published" / "README.md").read_text()
        card.write_text(whole.replace("pipeline_tag: fill-mask", text))
        done = subprocess.run(
            [sys.executable, "-c", validate, str(card)], env={**publish.env, "HF_ENDPOINT": hub.url},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == is_valid, done.stderr


def test_a_second_version_replaces_the_first_in_one_commit(publish: Publisher, hub: Hub, model: Path) -> None:
    first = Repository(private=False)
    first.files |= {name: b"old" for name in ("config.json", "model-00001-of-00002.safetensors", "added_tokens.json")}
    others = ("notes.md", "onnx/config.json", "model-old/model.safetensors")
    first.files |= dict.fromkeys(others, b"mine")
    hub.repositories[NAME] = first
    publish(f"hf://{NAME}", HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert first.files.keys() >= set(others)
    mine = {name: first.files.pop(name) for name in others}
    assert set(mine.values()) == {b"mine"}
    has_model(first, model)
    assert first.commits == ["initial commit", "Publish the model"]
    publish(f"hf://{NAME}", HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert first.commits == ["initial commit", "Publish the model"], "nothing has changed"


def test_a_new_repository_can_be_private(publish: Publisher, hub: Hub) -> None:
    publish(f"hf://{NAME}", "--private", HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    publish("hf://org/public", HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert {name: repository.private for name, repository in hub.repositories.items()} == {
        NAME: True, "org/public": False,
    }  # fmt: skip


def test_a_public_repository_is_not_taken_for_a_private_model(publish: Publisher, hub: Hub, model: Path) -> None:
    """The library ignores `private` for a repository that is there."""
    words = (f"hf://{NAME}", "--private")
    hub.repositories[NAME] = Repository(private=False)
    done = publish(*words, status=35, HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert_one_line_error(done, f"hf://{NAME} is there already and public", "leave --private out", status=35)
    assert set(hub.repositories[NAME].files) == {".gitattributes"}
    assert not hub.large, "nothing was uploaded"
    hub.repositories[NAME] = Repository(private=True)
    publish(*words, HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    has_model(hub.repositories[NAME], model)


def test_interrupted_before_its_commit_it_has_published_nothing_and_goes_on(
    publish: Publisher, hub: Hub, model: Path
) -> None:
    over = threading.Event()

    def stall(handler: Handler) -> None:
        over.wait(60)
        handler.close_connection = True

    for number, signum, status in ((1, signal.SIGKILL, -signal.SIGKILL), (2, signal.SIGINT, 75)):
        hub.fail(lambda method, path: path.endswith("/commit/main"), stall)
        process = subprocess.Popen(
            [*publish.words, f"hf://{NAME}"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**publish.env, "HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER},
        )  # fmt: skip
        try:
            wait_until(lambda number=number: hub.count("POST", "/commit/main") == number)  # type: ignore[misc]
            process.send_signal(signum)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
            process.wait()
        assert process.returncode == status, said
        assert "Traceback" not in said
        assert set(hub.repositories[NAME].files) == {".gitattributes"}
    over.set()
    publish(f"hf://{NAME}", HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    has_model(hub.repositories[NAME], model)
    assert hub.count("PUT", "/lfs/") == 1, "what was uploaded is not sent again"


@pytest.mark.parametrize(
    ("token", "line"),
    [
        ("hf_ofSomebodyElse", "does not accept the token (HTTP 401); renew it with `hf auth login`"),
        (READER, "the token may not write there (HTTP 403); use one with write permission for org"),
        ("", "no token for the Hub is known here; run `hf auth login`, or set HF_TOKEN"),
    ],
    ids=("401", "403", "none"),
)
def test_a_token_that_is_missing_or_refused_is_one_line(publish: Publisher, hub: Hub, token: str, line: str) -> None:
    done = publish(f"hf://{NAME}", status=35, HF_ENDPOINT=hub.url, HF_TOKEN=token)
    assert_one_line_error(done, f"hf://{NAME}: ", line, status=35)
    assert not token or token not in done.stdout + done.stderr
    assert not hub.repositories
    dry = publish(f"hf://{NAME}", "--dry-run", status=0 if token else 35, HF_ENDPOINT=hub.url, HF_TOKEN=token)
    assert "model.safetensors" in dry.stdout, "what would go is listed all the same"


def test_the_token_of_a_login_is_used(publish: Publisher, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hf-home").mkdir()
    (tmp_path / "hf-home" / "token").write_text(WRITER)
    publish(f"hf://{NAME}", HF_ENDPOINT=hub.url)
    assert hub.tokens == {WRITER}


@pytest.mark.parametrize(
    "name", ["", "alone", "a/b/c", "org/na me", "org/-x", "org/x--y", "org/x.git", "org/" + 97 * "x"]
)
def test_a_name_that_the_hub_does_not_allow_is_one_line(publish: Publisher, name: str) -> None:
    done = publish(f"hf://{name}", "--dry-run", status=35)
    assert_one_line_error(done, f"hf://{name} is not a name on the Hub; write hf://org/name", status=35)


def test_a_password_in_the_address_is_not_shown(publish: Publisher) -> None:
    done = publish("hf://jane:hunter2@org/name", status=35)
    assert_one_line_error(done, "is not a name on the Hub", status=35)
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_or_answers_nonsense_is_one_line(publish: Publisher, hub: Hub) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    done = publish(f"hf://{NAME}", status=35, HF_ENDPOINT=nobody, HF_TOKEN=WRITER)
    assert_one_line_error(done, f"the connection to {nobody} failed", "check this machine's network", status=35)
    done = publish(f"hf://{NAME}", status=35, HF_ENDPOINT=hub.url, HF_TOKEN=WRITER, HF_HUB_OFFLINE="1")
    assert_one_line_error(done, "offline", status=35)
    html = b"<html>It works!</html>"
    hub.fail(lambda method, path: path == "/api/repos/create", lambda handler: handler.answer(200, html))
    done = publish(f"hf://{NAME}", status=35, HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert_one_line_error(done, f"the connection to {hub.url} failed (Expecting value", status=35)
    hub.fail(lambda method, path: path.endswith("/commit/main"), lambda handler: handler.answer(500, {"error": "Oh."}))
    done = publish(f"hf://{NAME}", status=35, HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert_one_line_error(done, "answered HTTP 500", "run the same again later", status=35)


def test_metadata_that_the_hub_refuses_is_one_line_before_anything_is_sent(publish: Publisher, hub: Hub) -> None:
    done = publish(f"hf://{NAME}", "--Card-license", "wtf", status=35, HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert_one_line_error(done, "does not accept the model card", '"license" must be one of', status=35)
    assert not hub.repositories


def test_publishing_imports_no_torch(publish: Publisher, hub: Hub) -> None:
    program = f"""
import sys
from pipeline.__main__ import main
assert main(["publish", "hf://{NAME}"]) == 0
heavy = {{"torch", "transformers", "h5py", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    publish.python(program, HF_ENDPOINT=hub.url, HF_TOKEN=WRITER)
    assert NAME in hub.repositories
