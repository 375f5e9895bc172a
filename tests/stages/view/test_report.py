"""The page, the card and what they are made from."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from stages.directory.attempts import read, recording
from stages.directory.manifest import why_incomplete
from stages.report import view_of
from stages.view.card import card
from stages.view.curves import MetricsFile, points
from stages.view.facts import training_table
from stages.view.page import page
from stages.view.text import duration, number, size
from tests.helpers import browser
from tests.helpers.runs import EVALUATION, VALUES, write_metrics, write_run
from tests.helpers.support import ROOT, assert_one_line_error, forked, metrics

STEPS = (28125, 1563)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The stages of a run as long as AWS's tutorial; no test changes them."""
    return write_run(tmp_path_factory.mktemp("run"), STEPS)


@pytest.fixture(scope="module")
def text(run: list[Path]) -> str:
    return page(view_of(run, None))


@pytest.fixture
def small(tmp_path: Path) -> list[Path]:
    return write_run(tmp_path / "work", (12, 4))


class Parsed(HTMLParser):
    """The attributes that make a browser request something, the tables by their headings, and the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.figures: dict[str, list[list[str]]] = {}
        self._figure = ""
        self._row: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        self.asked += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        if tag == "tr":
            self._row = []

    def handle_endtag(self, tag: str) -> None:
        self._open.append("")
        if tag == "tr" and self._figure:
            self.figures[self._figure].append(self._row)
        if tag == "figure":
            self._figure = ""

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["h3"]:
            self._figure = data
            self.figures[data] = []
        elif self._open[-1:] in (["td"], ["th"]):
            self._row.append(data)


def test_the_page_of_30_000_steps_is_small_and_asks_for_nothing(text: str) -> None:
    assert len(text.encode()) < 1_000_000
    parsed = Parsed(text)
    assert parsed.asked == ["data:,"]
    assert not {"script", "img", "iframe", "object", "embed", "base"} & set(parsed.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_tables_have_the_means_of_all_steps(run: list[Path], text: str) -> None:
    """Each step is in one row; the mean, minimum and maximum are numpy's."""
    figures = Parsed(text).figures
    titles = ("Loss", "Masked-LM loss", "Next-sentence loss", "Learning rate", "Gradient norm", "Throughput")
    assert set(figures) == set(titles)
    for phase, directory in ((1, run[1]), (2, run[2])):
        records = metrics(directory)
        for title, name in zip(titles, VALUES, strict=True):
            values = np.array([record[name] for record in records])
            head, *rows = figures[title]
            rows = [row for row in rows if row[0] == str(phase)]
            ends = [[int(step.replace(",", "")) for step in row[1].split(" – ")] for row in rows]
            covered = [step for end in ends for step in range(end[0], end[-1] + 1)]
            assert covered == [record["step"] for record in records]
            for row, end in zip(rows, ends, strict=True):
                part = values[end[0] - records[0]["step"] : end[-1] - records[0]["step"] + 1]
                shown = [float(cell.replace(",", "")) for cell in row[2:]]
                # To as many digits as are shown.
                np.testing.assert_allclose(shown, [part.mean(), part.min(), part.max()], rtol=6e-4)


def test_a_curve_has_few_points_and_none_is_left_out() -> None:
    for count in (1, 2, 199, 200, 201, 400, 28125):
        found = points(range(count), [1.0] * count, 200)
        assert len(found) <= 200
        assert sum(point.last - point.first + 1 for point in found) == count


def test_what_stopped_it_is_in_the_time_line(text: str) -> None:
    said = re.findall(r"<title>(\w+) after ", text)
    assert sorted(set(said)) == ["complete", "failed", "interrupted", "killed"]
    assert "CUDA &lt;error&gt;" in text
    assert "<error>" not in text
    assert "8 attempts, 3 of them stopped early" in text


def test_goodput_is_named_as_a_share_of_all_the_time(run: list[Path]) -> None:
    """Work took 99.997 % of the time at work, and 99.91 % of that since the first start."""
    rows = {name: values for name, *values in training_table(view_of(run, None))}
    assert rows["goodput: share of the time since the first start in steps that counted"][0] == "99.9%"


def test_addresses_are_shown_without_their_secrets(run: list[Path], tmp_path: Path) -> None:
    settings = {"corpus": {"source": "https://me:hunter2@example.org/a.bz2?X-Amz-Signature=abc s3://bucket/b"}}
    shown = page(view_of(run, settings)) + page(view_of(run, None))
    assert "hunter2" not in shown
    assert "Signature" not in shown
    assert "https://example.org/a.bz2 s3://bucket/b" in shown


def test_the_page_says_where_the_data_card_is(small: list[Path]) -> None:
    assert "data card" not in page(view_of(small, None))
    (small[0] / "DATACARD.md").write_text("# Tokenized text")
    assert f"<caption>data card: {small[0]}/DATACARD.md</caption>" in page(view_of(small, None))


def test_the_evaluation_is_that_of_the_manifest(text: str) -> None:
    for cell in (
        "61.3%",
        "93.5%",
        "1.93 nats",
        "0.21 nats",
        "30,417",
        "7.24 nats",
        "5.9%",
        "73.1%",
        "38.2%",
        "0.6275",
        "69.2%",
        "54.1%",
    ):
        assert f">{cell}<" in text, cell


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason=f"none of {', '.join(browser.NAMES)} is installed")
def test_a_real_browser_shows_it_at_two_widths(text: str, tmp_path: Path) -> None:
    """It requests nothing but the page, has no error, is no wider than the window, and draws every picture."""
    (tmp_path / "report.html").write_text(text)
    with browser.browser() as tab:
        for width in browser.WIDTHS:
            backgrounds = set()
            for dark in (False, True):
                tab.open(tmp_path / "report.html", width=width, dark=dark)
                tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                outside = tab.evaluate(
                    "[...document.querySelectorAll('h1, h2, h3, p, figure, dl > div, .table, pre')]"
                    f".filter(one => one.getBoundingClientRect().right > {width}).length"
                )
                assert outside == 0
                shown = "filter(one => one.getBoundingClientRect().width > 250)"
                drawn = f"[...document.querySelectorAll('figure svg')].{shown}"
                assert tab.evaluate(f"{drawn}.length") == 7
                # A unit of the drawing is at least 0.9 pixels, so that its letters are readable.
                assert tab.evaluate(f"Math.min(...{drawn}.map(one => one.getScreenCTM().a))") >= 0.9
                backgrounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
                asked = [
                    e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"
                ]
                assert [url for url in asked if not url.startswith("data:")] == [(tmp_path / "report.html").as_uri()]
                assert not [event for event in tab.events if event["method"] == "Log.entryAdded"]
            assert len(backgrounds) == 2


def test_metrics_read_as_they_grow_are_those_read_at_once(tmp_path: Path) -> None:
    """Lines arrive whole and in parts; a resumed run truncates the file and repeats steps."""
    path, rng = tmp_path / "metrics.jsonl", random.Random(0)
    grown = MetricsFile(path)
    assert grown.read().steps == []
    write_metrics(path, 1, 30)
    for seed in range(60):
        lines = path.read_text().splitlines(keepends=True)
        if rng.random() < 0.3:
            keep = rng.randrange(len(lines))
            path.write_text("".join(lines[:keep]))
        steps = len(path.read_text().splitlines())
        write_metrics(path, steps + 1, rng.randrange(1, 20), seed=seed, mode="a")
        content = path.read_bytes()
        path.write_bytes(content[: -rng.randrange(1, 40)])
        assert grown.read() == MetricsFile(path).read()
        path.write_bytes(content)
        now = grown.read()
        assert now == MetricsFile(path).read()
        assert now.values["loss"] == [json.loads(line)["loss"] for line in content.splitlines()]


def test_attempts_are_recorded_however_they_end(tmp_path: Path) -> None:
    (tmp_path / "stage.log").write_text("")
    program = (
        "import os, sys; from pathlib import Path; from stages.directory.attempts import recording\n"
        "with recording(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    os.utime(tmp_path / "stage.log", (2e9, 2e9))
    (killed,) = read(tmp_path, running=False, complete=False)
    assert (killed.how, killed.ended) == ("killed", 2e9)
    assert [one.how for one in read(tmp_path, running=True, complete=False)] == ["running"]
    with pytest.raises(RuntimeError), recording(tmp_path):
        raise RuntimeError("first line\nno memory")
    with recording(tmp_path) as record:
        record("complete", 0, "the last line of the log")
    os.utime(tmp_path / "stage.log", (3e9, 3e9))
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"half a li')
    attempts = (tmp_path / "attempts.jsonl").read_text()
    (tmp_path / "attempts.jsonl").write_text(attempts[: attempts.rindex('{"ended')])  # the disk was full
    assert [one.how for one in read(tmp_path, running=False, complete=True)][-1] == "complete"
    (tmp_path / "attempts.jsonl").write_text(attempts)
    found = read(tmp_path, running=False, complete=True)
    assert [(one.how, one.error) for one in found] == [("killed", ""), ("failed", "no memory"), ("complete", "")]
    assert found[0].ended == 2e9


def test_an_attempt_after_a_line_that_was_cut_short_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"started": 17.0, "host": "a", "pid": 1}\n{"ended": 18.0, "how": "fai')
    with recording(tmp_path) as record:
        record("complete", 0, "")
    found = read(tmp_path, running=False, complete=True)
    assert [one.how for one in found] == ["killed", "complete"]


def make(small: list[Path], out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return forked("stages.report", *small, "--out", out, **env)


def test_the_card_is_one_that_the_hub_reads(small: list[Path], tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    assert make(small, tmp_path / "out").returncode == 0
    loaded = huggingface_hub.ModelCard.load(small[3] / "model" / "README.md")
    assert (loaded.data.library_name, loaded.data.pipeline_tag) == ("transformers", "fill-mask")
    results = {
        (one.dataset_name, one.metric_name): (one.metric_type, one.metric_value) for one in loaded.data.eval_results
    }
    assert results == {
        ("held-out examples", "masked-LM accuracy"): ("accuracy", EVALUATION["masked_lm_accuracy"]),
        ("held-out examples", "masked-LM loss"): ("loss", EVALUATION["masked_lm_loss"]),
        ("held-out examples", "next-sentence accuracy"): ("accuracy", EVALUATION["next_sentence_accuracy"]),
        ("held-out examples", "next-sentence loss"): ("loss", EVALUATION["next_sentence_loss"]),
        ("BLiMP", "accuracy"): ("accuracy", EVALUATION["blimp_accuracy"]),
    }
    for part in ("## Data", "## Results", "## Settings", "## Versions", "61.3%", "336,226,108", "| python |"):
        assert part in loaded.text
    assert "hunter2" not in loaded.text


def test_the_score_of_a_subset_of_blimp_is_not_published_as_its_accuracy(run: list[Path]) -> None:
    """The table says how many pairs there were."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    for samples, published in ((0, {"held-out examples", "BLiMP"}), (100, {"held-out examples"})):
        view = view_of(run, {})
        evaluation = view.stage("evaluate")
        assert evaluation is not None
        evaluation.record["parameters"]["blimp_samples"] = samples
        made = huggingface_hub.ModelCard(card(view))
        assert {one.dataset_name for one in made.data.eval_results} == published
        assert "| pairs of BLiMP | 2,000 |" in made.text


@pytest.mark.parametrize(
    ("source", "datasets", "language"),
    [
        ("builtin", None, "en"),
        ("/data/wiki.train.raw", ["Salesforce/wikitext"], "en"),
        ("'/my data/dewiki-latest-pages-articles.xml.bz2' simplewiki-1-pages-articles1.xml-p1p9.gz",
         ["wikimedia/wikipedia"], ["de", "en"]),
        ("hf://datasets/org/set/train.jsonl", None, None),  # nothing here reads it
        ("builtin 'secret plans/*.txt'", None, "en"),
        ("secret/notes.txt", None, None),
    ],
)  # fmt: skip
def test_text_that_is_known_by_its_name_is_in_the_metadata(
    run: list[Path], source: str, datasets: list[str] | None, language: list[str] | str | None
) -> None:
    """And the settings in [card] take precedence over it."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    data = huggingface_hub.ModelCard(card(view_of(run, {"corpus": {"source": source}}))).data
    assert (data.datasets, data.language, data.license) == (datasets, language, None)
    given = {"license": "mit", "language": "fr", "datasets": "a/b c/d"}
    data = huggingface_hub.ModelCard(card(view_of(run, {"corpus": {"source": source}, "card": given}))).data
    assert (data.datasets, data.language, data.license) == (["a/b", "c/d"], "fr", "mit")


def test_shards_from_the_hub_name_their_data_set(run: list[Path]) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    address = "https://huggingface.co/datasets/org/set/resolve/main/shards.tar"
    view = view_of(run, {"corpus": {"source": "builtin"}, "dataset": {"phase1_url": address, "phase2_url": address}})
    assert huggingface_hub.ModelCard(card(view)).data.datasets == ["org/set"]


def test_a_card_shows_no_local_folder_and_not_where_it_ran(run: list[Path]) -> None:
    settings = {
        "run": {"work_dir": "/disk/jane/work"},
        "corpus": {
            "source": "/disk/jane/a.txt 'jane doe/b*.txt' s3://bucket/c.txt",
            "vocab_file": "/disk/jane doe/v.txt",
        },
        "dataset": {"phase1_url": "file:///disk/jane/x.tar", "s3_endpoint": "http://inside:9000", "masking": "static"},
        "cluster": {"master_addr": "node7.inside", "nnodes": "2"},
    }
    shown = card(view_of(run, settings))
    for private in ("jane", "inside", "/disk"):
        assert private not in shown
    for public in ("a.txt b*.txt s3://bucket/c.txt", "v.txt", "x.tar", "static", "nnodes"):
        assert public in shown


def test_a_card_that_was_edited_stays_and_one_that_is_gone_comes_back(small: list[Path], tmp_path: Path) -> None:
    out, card = tmp_path / "out", small[3] / "model" / "README.md"
    assert make(small, out).returncode == 0
    fingerprint = json.loads((out / "manifest.json").read_text())["fingerprint"]
    made = card.read_text()
    assert made == (out / "model-card.md").read_text()
    card.write_text(made.replace("not been fine-tuned", "been fine-tuned for cooking"))
    assert why_incomplete(out, fingerprint, verify=True) is None
    assert (
        why_incomplete(small[3], json.loads((small[3] / "manifest.json").read_text())["fingerprint"], verify=True)
        is None
    )
    (out / "manifest.json").unlink()
    assert "was edited, so it stays" in make(small, out).stdout
    assert "cooking" in card.read_text()
    card.unlink()
    assert why_incomplete(out, fingerprint) == f"{card} is missing"
    assert make(small, out).returncode == 0
    assert card.read_text() == made


@pytest.mark.slow
def test_killed_at_every_write_it_ends_with_the_same_files(small: list[Path], tmp_path: Path) -> None:
    log, card = tmp_path / "points", small[3] / "model" / "README.md"
    assert make(small, tmp_path / "straight", FAILPOINT="none", FAILPOINT_LOG=str(log)).returncode == 0
    names = list(dict.fromkeys(log.read_text().split()))
    assert len([name for name in names if "README.md" in name]) == 4
    assert len(names) >= 20
    wanted = {name: (tmp_path / "straight" / name).read_bytes() for name in ("report.html", "model-card.md")}
    for name in names:
        out = tmp_path / "killed"
        card.unlink()
        assert make(small, out, FAILPOINT=name).returncode == -signal.SIGKILL, name
        if card.exists():
            assert card.read_bytes() == wanted["model-card.md"], name
        assert make(small, out).returncode == 0, name
        assert {name: (out / name).read_bytes() for name in wanted} == wanted, name
        assert card.read_bytes() == wanted["model-card.md"], name
        assert not list(tmp_path.rglob("*.tmp")), name
        shutil.rmtree(out)


def test_what_is_no_stage_is_refused_in_one_line(tmp_path: Path) -> None:
    done = forked("stages.report", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert (
        done.stdout
        == f"error: {tmp_path} has no stage.json; give directories of stages, such as work/latest/evaluate\n"
    )


@pytest.mark.parametrize("content", ["[1]", '{"phase1": 3}', '{"phase1": {"lr": 0.001}}', "{"])
def test_settings_that_are_none_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.json").write_text(content)
    done = forked("stages.report", tmp_path, "--settings", tmp_path / "settings.json", "--out", tmp_path / "out")
    assert_one_line_error(done, "settings.json is not JSON of {section: {key: text}}")


def test_numbers_are_written_as_people_read_them() -> None:
    assert [number(x) for x in (28125, 6.51234, 0.0004, 2.8e-5, 0.0, 12345.6, float("nan"))] == [
        "28,125", "6.512", "0.0004", "2.8e-05", "0", "12,346", "–",
    ]  # fmt: skip
    assert [duration(x) for x in (0.04, 12.3, 245, 59.7, 162_120, 360_000)] == [
        "0.0 s", "12 s", "4 min 05 s", "1 min 00 s", "45 h 02 min", "4 d 4 h",
    ]  # fmt: skip
    assert [size(x) for x in (0, 999, 12_345, 4e9, 5e13)] == ["0 B", "999 B", "12.3 kB", "4.0 GB", "50.0 TB"]
