"""`python -m pipeline report` and the page that a run keeps up to date: the state at that moment."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from stages.directory.attempts import read
from tests.helpers.chain import Chain, finished_chain, wait_until
from tests.helpers.support import metrics


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A chain that has run to its end; tests that change it take a copy."""
    return finished_chain(tmp_path_factory)


@pytest.fixture
def prepared(chain: Chain, tmp_path: Path) -> Chain:
    """A copy in which the data is made and nothing is trained."""
    copy = chain.copy(tmp_path / "copy")
    for label in ("pretrain-phase1", "convert_checkpoint", "pretrain-phase2", "merge_shards", "evaluate", "report"):
        shutil.rmtree(copy.latest(label))
        (copy.work / "latest" / label).unlink()
    (copy.work / "report.html").unlink()
    return copy


def headline(chain: Chain) -> str:
    """The title of the page, or '' if there is none."""
    page = chain.work / "report.html"
    return page.read_text().split("<title>")[1].split("</title>")[0] if page.exists() else ""


def test_a_finished_chain_has_its_page_and_its_card(chain: Chain) -> None:
    assert headline(chain) == "BERT pretraining: complete"
    directory, model = chain.latest("report"), chain.latest("merge_shards") / "model"
    page = (directory / "report.html").read_text()
    evaluated = chain.manifest("evaluate")["counts"]
    assert isinstance(evaluated, dict)
    for text in (page, (model / "README.md").read_text()):
        for name in ("masked_lm_accuracy", "next_sentence_accuracy"):
            assert f"{evaluated[name]:.1%}" in text
        for setting in ("global_batch_size", "whole_word_mask", "tensor_parallel_size"):
            assert setting in text
    assert str(model.name) in page
    assert (model / "README.md").read_text() == (directory / "model-card.md").read_text()
    listed = chain.manifest("merge_shards")["outputs"]
    assert isinstance(listed, list)
    assert "model/README.md" not in [output["path"] for output in listed]


def test_it_is_written_at_any_time_and_anywhere(prepared: Chain, tmp_path: Path) -> None:
    said = prepared.ask("report", "--out", str(tmp_path / "page.html")).stdout
    assert said == f"{tmp_path / 'page.html'}: 5 of 11 stages are complete\n"
    assert "tokenize_corpus" in (tmp_path / "page.html").read_text()
    empty = prepared.ask("report", "--Run-work-dir", str(tmp_path / "none")).stdout
    assert empty == f"{tmp_path / 'none' / 'report.html'}: 0 of 11 stages are complete\n"


@pytest.mark.slow
def test_it_is_written_while_training_and_after_an_interruption(prepared: Chain) -> None:
    words = ("Pretrain", "--phase", "1", "--Run-report-interval-s", "0.1")
    process = prepared.start(*words, "--Phase1-max-steps", "100000")
    try:
        wait_until(lambda: headline(prepared).startswith("BERT pretraining: pretrain-phase1 is running: "))
        wait_until(lambda: "<h3>Gradient norm</h3>" in (prepared.work / "report.html").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
    # With the settings of that run; the page was last written after its lock was released.
    assert headline(prepared).startswith("BERT pretraining: pretrain-phase1 was interrupted: at ")
    assert not list(prepared.work.glob("*.tmp"))


def test_a_crash_and_the_restart_are_in_the_time_line(prepared: Chain, tmp_path: Path) -> None:
    token = tmp_path / "once"
    token.touch()
    prepared.run("Pretrain", "--phase", "1", FAILPOINT="step:7.0", FAILPOINT_TOKEN=str(token))
    directory = prepared.latest("pretrain-phase1")
    first, second = read(directory, running=False, complete=True)
    assert (first.how, second.how) == ("failed", "complete")
    assert first.started < first.ended <= second.started < second.ended
    page = (prepared.work / "report.html").read_text()
    resumed = re.findall(r"ckpt_(\d+) at step \1", (directory / "stage.log").read_text())
    assert resumed in (["3"], ["6"])  # what was durable by then
    assert f"<title>resumed at step {int(resumed[0]) + 1}</title>" in page
    assert "<title>failed after " in page
    assert [record["step"] for record in metrics(directory)] == list(range(1, 9))


def test_trouble_with_the_page_is_no_trouble_of_the_run(prepared: Chain) -> None:
    (prepared.work / "report.html").mkdir()
    done = prepared.run("Precompile", "--phase", "1", "--Precision-mode", "fp32")
    (line,) = [line for line in done.stderr.splitlines() if "report.html was not written" in line]
    assert line.startswith("note: ")


def test_a_model_card_that_is_gone_is_made_again_and_the_model_is_not(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    card = copy.latest("merge_shards") / "model" / "README.md"
    card.unlink()
    assert copy.ask("why", "BertPhase2", status=1).stdout == f"report would run: {card} is missing\n"
    done = copy.run("BertPhase2")
    assert [line.split(":")[0] for line in done.stderr.splitlines() if ": started in " in line] == ["report"]
    assert card.read_text() == (copy.latest("report") / "model-card.md").read_text()
    copy.ask("why", "BertPhase2", "--verify")


def test_a_model_that_is_made_again_keeps_the_card_that_was_edited(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    model = copy.latest("merge_shards") / "model"
    (model / "README.md").write_text("mine")
    (model / "model.safetensors").unlink()
    copy.run("BertPhase2")
    assert (model / "README.md").read_text() == "mine"
    copy.ask("why", "BertPhase2", "--verify")
    manifest = json.loads((model.parent / "manifest.json").read_text())
    assert manifest["outputs"] == chain.manifest("merge_shards")["outputs"]


def test_the_pipeline_draws_it_without_torch(chain: Chain) -> None:
    chain.without_torch("from pipeline.__main__ import main\nassert main(['report']) == 0\n")
