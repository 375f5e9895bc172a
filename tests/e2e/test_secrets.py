"""Canaries in every place that takes a secret: real commands work with them, and leave them nowhere."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from pipeline.settings.sections import SECTIONS, section_name
from tests.helpers.chain import Chain
from tests.helpers.checkpoints import CONFIG, snapshot, write_native
from tests.helpers.luigid import luigid
from tests.helpers.post import Post
from tests.helpers.ready import pack
from tests.helpers.support import forked, write_dataset
from tests.helpers.web import Web, serving, status
from tests.pipeline.tasks.nights import test_nightly

inbox = test_nightly.post
DATE, FAILING = "2026-11-20", "2026-11-21"
SAS = "sp=r&st=2026-11-20T00:00:00Z&se=2026-11-22T00:00:00Z&spr=https&sv=2022-11-02&sr=b&sig={}"
AWS_V2 = "AWSAccessKeyId=AKIA0123&Expires=1800000000&Signature={}"
TOKEN = "version=3&access_token={}"
NIGHTS = """
[email]
receiver = someone@example.org
force_send = true
[smtp]
host = 127.0.0.1
port = {smtp}
no_tls = true
[sendgrid]
apikey = {sendgrid}
[task_history]
db_connection = mysql://me:{history}@127.0.0.1/history
[nights]
keep = 2
webhook = http://127.0.0.1:{http}/hook/{webhook}
"""
#: Keeps the command line of every Python process.
SITE = """
import os, sys
with open(os.environ["ARGV_LOG"], "a") as file:
    file.write(repr(sys.orig_argv) + "\\n")
"""


class Canaries(dict[str, str]):
    """Makes a canary for any name."""

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, f"K4n{secrets.token_hex(10)}")

    def found_in(self, text: str | bytes) -> list[str]:
        there = text.encode() if isinstance(text, str) else text
        return [name for name, value in self.items() if value.encode() in there]


@pytest.fixture
def canaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Canaries:
    """Those of the environment are already planted."""
    made = Canaries()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login me password {made['netrc']}\n")
    (tmp_path / ".netrc").chmod(0o600)
    variables = {
        "PYTHONPATH": str(tmp_path / "site"),
        "ARGV_LOG": str(tmp_path / "argv.log"),
        "NETRC": str(tmp_path / ".netrc"),
        "AWS_ACCESS_KEY_ID": "AKIA0123456789",
        "AWS_SECRET_ACCESS_KEY": made["aws key"],
        "AWS_SESSION_TOKEN": made["aws token"],
        "HTTPS_PROXY": f"http://me:{made['proxy']}@127.0.0.1:1",
        "NO_PROXY": "127.0.0.1",
        "SOME_API_TOKEN": made["variable"],
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def checkpoint(tmp_path: Path, canaries: Canaries) -> Iterator[Web]:
    """`ckpt_7.pt` at an address with a login and an Azure signature."""
    native = write_native(tmp_path, snapshot(step=7))
    assert forked("stages.convert", native, tmp_path / "script", "--to", "pt").returncode == 0
    data = (tmp_path / "script" / "ckpt_7.pt").read_bytes()
    with serving(data, f"/ckpt_7.pt?{SAS.format(canaries['azure'])}") as web:
        web.url = web.url.replace("//", f"//me:p@{canaries['login']}@")
        yield web


@pytest.fixture
def archives(tmp_path: Path, canaries: Canaries) -> Iterator[tuple[Web, Web]]:
    """Phase 1's data at an address signed as boto3 does by default, and phase 2's at an S3 endpoint."""
    found = [
        pack(write_dataset(tmp_path / f"data{length}" / "in", [24, 24], seq_len=length, max_pred_len=most), "")
        for length, most in ((32, 5), (64, 10))
    ]
    with (
        serving(found[0].read_bytes(), f"/one.tar?{AWS_V2.format(canaries['aws v2'])}") as web,
        serving(found[1].read_bytes(), "/data/two.tar") as s3,
    ):
        yield web, s3


@pytest.fixture
def chain(
    tmp_path: Path,
    inbox: Post,
    checkpoint: Web,
    archives: tuple[Web, Web],
    canaries: Canaries,
) -> Chain:
    one, s3 = archives
    endpoint = s3.url.removesuffix("/data/two.tar").replace("//", f"//me:{canaries['endpoint']}@")
    given = {name: canaries[name] for name in ("sendgrid", "history", "webhook")}
    store = f"[store]\nurl = {tmp_path / 'store'}\n"
    made = Chain(tmp_path, NIGHTS.format(smtp=inbox.smtp, http=inbox.http, **given) + store)
    model = "".join(f"{name} = {value}\n" for name, value in CONFIG.to_hugging_face().items() if name in _MODEL)
    text = made.config.read_text().replace("shards = 2\n", (
        f"phase1_url = {one.url}&day={{date}}\nphase2_url = s3://data/two.tar\n"
        f"s3_endpoint = {endpoint}\ns3_profile = default\n"
    ))  # fmt: skip
    before, _, after = text.partition("[model]\n")
    after = after[after.index("[phase1]") :].replace("[phase2]\n", f"[phase2]\nstart_from = {checkpoint.url}\n")
    made.config.write_text(f"{before}[model]\n{model}{after}[mnist]\nurl = {one.url}\n")
    made.config.chmod(0o600)
    return made


_MODEL = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
          "max_position_embeddings")  # fmt: skip


def everything(chain: Chain, inbox: Post) -> Iterator[tuple[str, bytes]]:
    """Everything that was written and sent: (what, its content)."""
    for path in sorted((*chain.work.rglob("*"), *(chain.directory / "store").rglob("*"))):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(chain.directory)), path.read_bytes()
    yield "mails", b"".join(mail.as_bytes() for _, mail in inbox.mails)
    # as_bytes may encode them in base64
    yield (
        "mail texts",
        b"".join(
            part.get_payload(decode=True) or b""
            for _, mail in inbox.mails
            for part in mail.walk()  # type: ignore[misc]
        ),
    )
    yield "webhook", json.dumps(inbox.hooks).encode()
    yield "command lines", (chain.directory / "argv.log").read_bytes()
    for log in chain.directory.glob("*.log"):
        yield log.name, log.read_bytes()


def assert_no_canary(chain: Chain, inbox: Post, canaries: Canaries, *said: str) -> None:
    for what, content in (*everything(chain, inbox), *(("output", text.encode()) for text in said)):
        assert not canaries.found_in(content), f"{what} has a secret: {canaries.found_in(content)}"


@pytest.mark.slow
def test_a_night_leaves_no_secret_anywhere(
    chain: Chain,
    inbox: Post,
    checkpoint: Web,
    archives: tuple[Web, Web],
    canaries: Canaries,
) -> None:
    """One night ends well, with phase 2's data from S3 and a checkpoint from the web, and one fails; with luigid,
    whose address has a login."""
    with luigid(chain) as (api, _):
        text, url = chain.config.read_text(), api.url.replace("//", f"//me:{canaries['scheduler']}@")
        chain.config.write_text(text.replace("scheduler_host = 127.0.0.1", f"scheduler_url = {url}"))
        done = chain.run("Nightly", "--date", DATE)
        assert "of http://127.0.0.1" in done.stderr, "the summary names what phase 2 started from"
        checkpoint.replace(checkpoint.data + b"x")
        checkpoint.probe_faults.append(status(403))
        failed = chain.run("Nightly", "--date", FAILING, "--Phase2-max-steps", "5", "--Phase1-lr", "1",
                           "--Model-hidden-dropout-prob", "0.2", status=30)  # fmt: skip
        known = json.dumps([api.ask("task_list", status=s, upstream_status="") for s in ("DONE", "FAILED", "DISABLED")])
    assert "Nightly" in known
    assert list((chain.directory / "store/stages/report").iterdir())
    night = chain.work / "nights" / DATE
    (fetched,) = night.glob("convert_checkpoint-*")
    assert json.loads((fetched / "manifest.json").read_text())["inputs"] == {
        "start_from": checkpoint.url.partition("?")[0].replace(f"me:p@{canaries['login']}@", "")
    }
    assert {facts["status"] for facts in inbox.hooks} == {"complete", "failed"}
    assert len(inbox.mails) == 2
    assert "HTTP 403: access is denied" in inbox.hooks[1]["line"]
    lines = (chain.directory / "argv.log").read_text()
    for stage in ("stages.convert", "stages.download", "stages.report", "pipeline.tasks.nights.one_night", "luigid"):
        assert stage in lines
    why = chain.ask("why", "BertPhase2", LUIGI_CONFIG_PATH=str(night / "night.cfg"))
    assert "is complete" in why.stdout, "the settings of a night, without secrets, are of the same identity"
    page_ = chain.ask("report", LUIGI_CONFIG_PATH=str(night / "night.cfg"))
    assert_no_canary(chain, inbox, canaries, done.stdout, done.stderr, failed.stdout, failed.stderr, known,
                     why.stdout + why.stderr, page_.stdout + page_.stderr)  # fmt: skip


@pytest.mark.slow
def test_a_renewed_signature_fetches_nothing_again_and_refusals_name_no_secret(
    chain: Chain,
    inbox: Post,
    archives: tuple[Web, Web],
    canaries: Canaries,
) -> None:
    web, _ = archives
    words = ("DownloadDataset", "--phase", "1")
    said = [chain.run(*words)]
    assert web.paths[0].endswith(f"{AWS_V2.format(canaries['aws v2'])}&day=%7Bdate%7D"), "what is asked"
    before = chain.config.read_text()
    renewed = before.replace(canaries["aws v2"], canaries["renewed"]).replace("Expires=18", "Expires=19")
    chain.config.write_text(renewed)
    said.append(chain.run(*words))
    assert "started" not in said[1].stderr
    said.append(chain.ask("why", *words))
    chain.config.write_text(renewed.replace("/one.tar", "/other.tar"))
    web.probe_faults.extend([status(403)] * 2)
    said.append(chain.run(*words, status=30))
    assert "/other.tar?day=" in said[3].stderr
    said.append(chain.run("DownloadMnist", status=30))
    for key, value in (
        ("phase1_url", f"http://me:{canaries['bad host']}@/x"),
        ("phase1_url", f"gopher://me:{canaries['bad scheme']}@host/x"),
        ("phase1_url", f"http://me:{canaries['bad port']}@[::1/x"),
        ("phase1_url", f"s3://AKIA:{canaries['bucket']}@bucket/x"),
        ("connections", f"https://me:{canaries['wrong setting']}@host/x"),
    ):
        lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in before.splitlines()]
        if key == "connections":
            lines = [f"{line}\n{key} = {value}" if line == "[dataset]" else line for line in lines]
        chain.config.write_text("\n".join(lines))
        said.append(chain.run(*words, status=35))
        assert "Traceback" not in said[-1].stderr
    assert_no_canary(chain, inbox, canaries, *(done.stdout + done.stderr for done in said))


def test_luigis_mail_quotes_a_command_line_without_its_secrets(
    chain: Chain,
    inbox: Post,
    archives: tuple[Web, Web],
    canaries: Canaries,
) -> None:
    """A user may give a secret on the command line, where others on the machine can see it; no mail has it."""
    web, _ = archives
    web.probe_faults.append(status(404))
    given = ("--Dataset-phase1-url", f"{web.url}&token={canaries['option']}", "--smtp-password", canaries["password"])
    hook = f"http://127.0.0.1:{inbox.http}/{canaries['hook']}"
    chain.run("DownloadDataset", "--phase", "1", *given, f"--Nights-webhook={hook}", status=30)
    ((_, mail),) = inbox.mails
    texts = [part.get_payload(decode=True) for part in mail.walk() if not part.is_multipart()]
    text = b"".join(part for part in texts if isinstance(part, bytes))
    assert b"--Dataset-phase1-url" in text
    assert b"HTTP 404" in text
    assert not canaries.found_in(text)


#: Settings of plain text, which take no address: paths, names and words.
PLAIN = {
    *("[run] work_dir", "[run] start_from", "[corpus] source", "[corpus] held_out_source", "[corpus] vocab_file"),
    *("[dataset] s3_profile", "[store] s3_profile", "[store] kms_key", "[evaluation] blimp", "[cluster] master_addr"),
    *("[cluster] allow_fallbacks", "[slurm] partition", "[slurm] account", "[slurm] time_limit"),
    *("[slurm] sbatch_lines", "[kubernetes] queue", "[kubernetes] image", "[kubernetes] namespace"),
    *("[kubernetes] volume_claim", "[kubernetes] mount_path", "[kubernetes] pod_resources"),
    *("[kubernetes] node_selector", "[kubernetes] service_account", "[trackers] names", "[trackers] project"),
}


def test_whatever_setting_holds_an_address_its_secrets_are_not_shown() -> None:
    """By its value itself, whatever is made of it; each with secrets of its own, as those that were met are masked
    everywhere."""
    shown = set()
    for section in SECTIONS:
        for name, parameter in section.get_params():
            canary = f"K4n{secrets.token_hex(10)}"
            try:
                value: Any = parameter.parse(f"https://me:{canary}@host/x?token={canary}z")
            except UserError as error:
                value = str(error)
            if canary in f"{value} {value!r}":
                shown.add(f"[{section_name(section)}] {name}")
    assert shown == PLAIN
