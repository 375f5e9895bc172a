"""`[nights] start_from = previous` through the real luigi: three nights, each with its own text, and a fourth begun.

2026-11-18 trains from scratch. The 19th has the 18th's text too, held-out documents included, and is killed between its
evaluation and the move of `latest`. The 20th ends badly because of its learning rate, and is rejected. The 21st is
killed once it has taken over what it continues from.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.errors import UserError
from common.files import sha256_of
from pipeline.tasks.nights.start_from import Candidate, decided, take_over
from tests.helpers.chain import Chain, write_corpus
from tests.helpers.post import SETTINGS, Post, receiving
from tests.helpers.support import assert_one_line_error, flip_a_byte, metrics
from trainer.data.hdf5 import open_hdf5
from trainer.state import TrainState

pytestmark = pytest.mark.slow

FIRST, SECOND, REJECTED, BEGUN = (f"2026-11-{day}" for day in (18, 19, 20, 21))
NIGHTS = "[nights]\nstart_from = previous\ngate_tolerance = 0.05\n"
SECRET = "do-not-show-this"


@dataclasses.dataclass
class Nights:
    """The four nights, and what was seen while they ran."""

    chain: Chain
    post: Post
    #: What luigi said, by date; for the second night, after it was killed.
    said: dict[str, str] = dataclasses.field(default_factory=dict)
    #: After the second night was killed: the target of `latest`, and whether there was a record.
    when_killed: tuple[str, bool] = ("", True)

    @property
    def path(self) -> Path:
        return self.chain.work / "nights"

    def record(self, date: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / f"{date}.json").read_text())
        return found

    def stage(self, date: str, label: str) -> Path:
        return (self.path / date / "latest" / label).resolve()

    def manifest(self, date: str, label: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.stage(date, label) / "manifest.json").read_text())
        return found

    def words(self, date: str, *others: str) -> tuple[str, ...]:
        source = ("--Corpus-source", str(self.chain.directory / "text" / "{date}" / "*.txt"))
        return ("Nightly", "--date", date, *source, *others)

    def run(self, date: str, *others: str, **environment: str) -> None:
        self.said[date] = self.chain.run(*self.words(date, *others), **environment).stderr

    def kill(self, date: str, point: str) -> None:
        process = self.chain.start(*self.words(date), FAILPOINT=point)
        assert process.wait(timeout=300) == -9, (self.chain.directory / "luigi.log").read_text()


def chain_in(directory: Path, post: Post) -> Chain:
    settings = (
        SETTINGS.format(smtp=post.smtp, http=post.http).replace("[nights]\n", NIGHTS).replace("keep = 2", "keep = 5")
    )
    chain = Chain(directory, settings.replace("/hook", f"/hook?token={SECRET}"))
    chain.config.write_text(chain.config.read_text().replace("[phase2]", "schedule = wsd\ndecay_share = 0.5\n[phase2]"))
    return chain


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    with receiving() as post:
        found = Nights(chain_in(tmp_path_factory.mktemp("nights"), post), post)
        for seed, date in enumerate((FIRST, SECOND, REJECTED, BEGUN)):
            (found.chain.directory / "text" / date).mkdir(parents=True)
            write_corpus(found.chain.directory / "text" / date / "corpus.txt", documents=40, seed=seed)
        text = found.chain.directory / "text"
        # Different white space and case do not make a different document.
        shouted = (text / FIRST / "corpus.txt").read_text().upper().replace(" ", "  ")
        (text / SECOND / "again.txt").write_text(shouted)
        found.run(FIRST)
        found.kill(SECOND, f"latest-before:{SECOND}")
        found.when_killed = ((found.path / "latest").resolve().name, (found.path / f"{SECOND}.json").exists())
        found.run(SECOND)
        found.run(REJECTED, "--Phase2-lr", "1")
        found.kill(BEGUN, "rename-after:parent")
        yield found


def test_each_night_continues_the_last_accepted_one(nights: Nights) -> None:
    assert f"night {FIRST}: no earlier night to continue: trains from scratch" in nights.said[FIRST]
    before = nights.stage(FIRST, "pretrain-phase1") / "checkpoints" / "ckpt_4"
    after = nights.stage(SECOND, "pretrain-phase1")
    manifest = nights.manifest(SECOND, "pretrain-phase1")
    identity = sha256_of(before / "manifest.json")
    assert manifest["inputs"] == {"start_from": {"night": FIRST, "checkpoint": identity}}
    assert nights.manifest(FIRST, "pretrain-phase1")["inputs"] == {}
    end = TrainState.read(after / "checkpoints" / "ckpt_8")
    assert (end.steps_before, end.step, end.origin) == (4, 8, identity)
    # It starts from the checkpoint before the decay, so its learning rate is at its peak from the first step on.
    assert [record["learning_rate"] for record in metrics(after)[:4]] == [0.005] * 4
    third = TrainState.read(nights.stage(REJECTED, "pretrain-phase1") / "checkpoints" / "ckpt_4")
    assert third.steps_before == 8, "the 4 stable ones of both nights before it"
    parent = decided(nights.path / BEGUN)
    assert parent is not None
    assert (parent.night, parent.record["steps"]) == (SECOND, 8), "not the rejected one"
    vocabularies = {
        (nights.stage(date, "tokenize_corpus") / "tokenizer" / "vocab.txt").read_bytes()
        for date in (FIRST, SECOND, REJECTED)
    }
    assert vocabularies == {parent.vocabulary.read_bytes()}


def documents(directory: Path, split: str) -> list[tuple[int, ...]]:
    """The ids of each tokenized document."""
    found = []
    for path in sorted(directory.glob(f"tokens_{split}_*.hdf5")):
        with open_hdf5(path) as file:
            ids, sentences, counts = (file[key][()] for key in ("tokens", "sentence_lengths", "document_lengths"))
        ends = np.cumsum(sentences)[np.cumsum(counts) - 1]
        found += [tuple(map(int, part)) for part in np.split(ids, ends[:-1])]
    return found


def test_what_was_held_out_first_stays_held_out(nights: Nights) -> None:
    """Against Hugging Face's tokenizer, document by document."""
    transformers = pytest.importorskip("transformers")
    first, second = (nights.stage(date, "tokenize_corpus") for date in (FIRST, SECOND))
    held_out, trained = set(documents(first, "test")), documents(second, "training")
    assert len(held_out) == 4
    tokenizer = transformers.BertTokenizerFast(str(first / "tokenizer" / "vocab.txt"))
    texts = nights.chain.directory / "text"
    expected = []
    for name in (f"{SECOND}/again.txt", f"{SECOND}/corpus.txt"):
        for document in (texts / name).read_text().split("\n\n"):
            ids = tuple(tokenizer(document, add_special_tokens=False)["input_ids"])
            expected += [ids] if ids not in held_out else []
    assert trained == expected
    assert len(expected) == 40 - 4 + 40
    counts = nights.manifest(SECOND, "tokenize_corpus")["counts"]
    assert counts["dropped"]["documents: held out"] == 4
    assert not documents(second, "test")


@torch.no_grad()
def test_the_loss_is_hugging_faces_on_the_first_nights_shards(nights: Nights) -> None:
    transformers = pytest.importorskip("transformers")
    (shard,) = nights.stage(FIRST, "shard_dataset-phase2").glob("*_test_*.hdf5")
    with open_hdf5(shard) as file:
        rows = {key: file[key][()].astype(np.int64) for key in file}
    for date in (FIRST, SECOND, REJECTED):
        record = nights.record(date)
        assert record["held_out"] == {shard.name: sha256_of(shard)}
        model = transformers.BertForPreTraining.from_pretrained(record["model"]).eval()
        losses = []
        for row in range(len(rows["input_ids"])):
            length = int(rows["input_mask"][row].sum())
            ids, segments = (torch.from_numpy(rows[k][row : row + 1, :length]) for k in ("input_ids", "segment_ids"))
            logits = model(ids, token_type_ids=segments).prediction_logits[0]
            at = rows["masked_lm_positions"][row]
            labels = torch.from_numpy(rows["masked_lm_ids"][row][at > 0])
            losses += F.cross_entropy(logits[at[at > 0]], labels, reduction="none").tolist()
        assert record["evaluation"]["masked_lm_loss"] == pytest.approx(np.mean(losses), rel=1e-4)  # fp32
        if date != FIRST:
            inputs = nights.manifest(date, "evaluate")["inputs"]
            assert inputs["held_out"] == record["held_out"]


def test_killed_before_latest_moves_the_same_command_moves_it(nights: Nights) -> None:
    assert nights.when_killed == (FIRST, False)
    assert "started in" not in nights.said[SECOND].replace(f"night {SECOND}: started in", ""), (
        "all stages were complete"
    )
    assert nights.record(SECOND)["gate"]["accepted"]
    told = [facts["status"] for facts in nights.post.hooks if facts["date"] == SECOND]
    assert told == ["killed", "complete"]


def test_a_rejected_night_is_kept_marked_and_told_once(nights: Nights) -> None:
    assert (nights.path / "latest").resolve().name == SECOND
    record = nights.record(REJECTED)
    loss = record["evaluation"]["masked_lm_loss"]
    limit, best = min((nights.record(one)["evaluation"]["masked_lm_loss"], one) for one in (FIRST, SECOND))
    assert record["gate"] == {
        "accepted": False, "loss": loss, "reference": best, "reference_loss": limit, "tolerance": 0.05,
    }  # fmt: skip
    assert loss > limit + 0.05
    assert Path(record["model"]).is_dir()
    nights.run(REJECTED)
    assert "started" not in nights.said[REJECTED]
    (told,) = [facts for facts in nights.post.hooks if facts["date"] == REJECTED]
    assert (told["event"], told["status"]) == ("rejection", "rejected")
    assert f"{loss:.4f} is above the {limit:.4f} of night {best}" in told["line"]
    assert [one for one in nights.post.subjects() if REJECTED in one] == [f"Luigi: Nightly {REJECTED} is rejected"]
    assert f"night {REJECTED}: rejected: held-out loss {loss:.4f}" in nights.chain.ask("nights").stdout
    assert f"night {REJECTED}: rejected" in nights.chain.ask("nights", "--check", "--date", REJECTED).stdout


def test_the_trend_is_in_the_terminal_and_on_a_page(nights: Nights) -> None:
    lines = nights.chain.ask("nights", "--trend").stdout.splitlines()
    page = (nights.path / "trend.html").read_text()
    assert not re.search(r"(src|href)=\"?(http|//)", page)
    for date, before, end in (
        (FIRST, "nothing", "accepted"),
        (SECOND, FIRST, "accepted"),
        (REJECTED, SECOND, "rejected"),
    ):
        (line,) = (line for line in lines if line.startswith(date))
        record = nights.record(date)
        loss, tokens = f"{record['evaluation']['masked_lm_loss']:.4g}", f"{record['text']['tokens']:,}"
        assert record["text"]["tokens"] == sum(
            len(one)
            for split in ("training", "test")
            for one in documents(nights.stage(date, "tokenize_corpus"), split)
        )
        for part in (f"  {loss}  ", f"  {tokens}  ", f"  {before}  ", f"  {end}"):
            assert part in line
            assert part.strip() in page
    assert record["seconds_at_work"] > 0
    assert f"3 complete, 1 of them rejected; latest: {SECOND}" in lines[-2]


def agrees(found: Candidate) -> None:
    """The settings fit every night."""


def test_what_a_night_has_begun_with_stays(nights: Nights) -> None:
    """Even when another night is accepted meanwhile, and when the one that it continues is removed."""
    begun = nights.path / BEGUN
    parent = take_over(begun, [nights.path / REJECTED], agrees)
    assert parent is not None
    assert parent.night == SECOND
    files = [path for path in parent.directory.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"parent", "ckpt_4", "held_out", "held_out_tokens"}
    source = nights.stage(SECOND, "pretrain-phase1")
    shutil.copytree(nights.path / SECOND, nights.chain.directory / "kept", symlinks=True)
    shutil.rmtree(nights.path / SECOND)
    try:
        assert decided(begun) == parent
        assert (parent.checkpoint / "optimizer-00-of-01.safetensors").exists()
        # Another night would now continue the first one, whose checkpoint is still there.
        (nights.path / "2026-11-22").mkdir()
        other = take_over(nights.path / "2026-11-22", [nights.path / SECOND, nights.path / FIRST], agrees)
        assert other is not None
        assert other.night == FIRST
    finally:
        shutil.rmtree(nights.path / "2026-11-22", ignore_errors=True)
        shutil.copytree(nights.chain.directory / "kept", nights.path / SECOND, symlinks=True)
    assert source.exists()


def test_what_was_altered_is_refused(nights: Nights, tmp_path: Path) -> None:
    """A held-out shard altered in the night's own folder is refused; a night whose checkpoint is damaged is skipped."""
    (shard,) = (nights.path / BEGUN / "parent" / "held_out").iterdir()
    content = shard.read_bytes()
    flip_a_byte(shard)
    done = nights.chain.run(*nights.words(BEGUN), status=30)
    assert f"{shard} has been altered since it was taken over from night {SECOND}" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    shard.write_bytes(content)

    copy = shutil.copytree(nights.path / SECOND, tmp_path / SECOND, symlinks=True)
    (weights,) = copy.glob("pretrain-phase1-*/checkpoints/ckpt_4/model-*")
    flip_a_byte(weights)
    (tmp_path / BEGUN).mkdir()

    def of_another_model(found: Candidate) -> None:
        raise UserError(f"night {found.directory.name} has another model")

    with pytest.raises(UserError, match=f"night {FIRST} has another model"):
        take_over(tmp_path / BEGUN, [copy, nights.path / FIRST], of_another_model)
    assert not (tmp_path / BEGUN / "parent").exists()
    assert take_over(tmp_path / BEGUN, [copy], agrees) is None
    assert json.loads((tmp_path / BEGUN / "parent" / "parent.json").read_text()) == {"night": None}
    assert take_over(tmp_path / BEGUN, [nights.path / SECOND], agrees) is None, "it goes on as it was begun"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (("--Model-hidden-size", "64"), "[model] hidden_size = 64 is not the 32 of night"),
        (("--Corpus-vocab-size", "400"), "[corpus] vocab_size = 400 is not the 300 of night"),
        (("--Corpus-vocab-file", "{tmp}/vocab.txt"), "vocab.txt is not the vocabulary of night"),
        (("--Evaluation-max-samples", "7"), "[evaluation] max_samples = 7 is not the 2000 of night"),
        (("--Phase1-schedule", "linear"), "[phase1] schedule = linear decays from the start; allowed: constant, wsd"),
        (("--Corpus-held-out", "0"), "needs text to evaluate on"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    nights: Nights, tmp_path: Path, setting: tuple[str, str], said: str
) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    today = str(datetime.date.today())
    (nights.chain.directory / "text" / today).mkdir(exist_ok=True)
    (nights.chain.directory / "text" / today / "a.txt").touch()
    given = (setting[0], setting[1].replace("{tmp}", str(tmp_path)))
    done = nights.chain.run(*nights.words(today, *given), status=35)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in done.stdout + done.stderr
    assert not (nights.path / today).exists()


def test_a_gate_needs_the_same_held_out_text(tmp_path: Path) -> None:
    chain = Chain(tmp_path, "[nights]\ngate_tolerance = 0.1\n")
    done = chain.run("Nightly", "--date", FIRST, status=35)
    assert "[nights] gate_tolerance = 0.1 compares losses on the same held-out text" in done.stdout + done.stderr
    done = chain.run("Nightly", "--date", FIRST, "--Nights-start-from", "first", status=35)
    assert_one_line_error(done, "[nights] start_from = first is not allowed; allowed: empty, previous", status=35)


def test_no_secret_is_in_what_is_written(nights: Nights) -> None:
    assert nights.post.hooks, "the address was used"
    written = [path for path in nights.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert not [date for date, text in nights.said.items() if SECRET in text]
