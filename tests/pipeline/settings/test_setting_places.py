"""An error about a setting says where it was given: on the command line, or in which line of which file."""

from __future__ import annotations

import configparser
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.settings.config_file import entries
from tests.helpers.support import ROOT, assert_one_line_error

LUIGI = ("-m", "luigi", "--module", "pipeline", "BertPhase2")


def run(directory: Path, *words: str, overlay: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run in a directory that may have a luigi.cfg of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if overlay is not None:
        environment["LUIGI_CONFIG_PATH"] = overlay
    done = subprocess.run(
        [sys.executable, *(words or LUIGI)], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert not (directory / "work").exists()
    return done


def at(text: str, fragment: str) -> int:
    """The number, from 1, of the line that begins with `fragment`, as an editor counts."""
    return next(number for number, line in enumerate(text.split("\n"), 1) if line.startswith(fragment))


@pytest.mark.parametrize(
    ("text", "fragment", "message"),
    [
        ("# a comment\n\n[phase1]\nseq_len = 128\n\nlr = fast\n", "lr", "[phase1] lr = 'fast'"),
        ("[phase1]\n  # indented\nlr : 1\n[phase2]\nlr: nan\n", "lr: nan", "[phase2] lr = nan"),
        ("[core]\nlog_level = INFO\n\n[phase3]\nlr = 1\n", "[phase3]", "did you mean phase"),
        ("[phase1]\nmax_step = 1\n", "max_step", "did you mean max_steps?"),
        ("[slurm]\nsbatch_lines = --a\n  --b\n\n[model]\npreset = huge\n", "preset", "[model] preset = huge"),
        ("[phase1]\nlr = 50%\n", "lr", "[phase1] lr: write %% for a %"),
        ("[run]\nwork_dir = ${NO_SUCH_VARIABLE}/x\n", "work_dir", "variable NO_SUCH_VARIABLE is not set"),
        ("[model]\nnum_attention_heads = 3\n", "num_attention_heads", "[model] hidden_size 128 / num_attention_heads"),
        ("[corpus]\nsource = /no/such/text\n", "source", "[corpus] source: /no/such/text matches no file"),
        ("[dataset]\nphase1_url = s3://b/1.tar\n", "phase1_url", "phase1_url is set and phase2_url is empty"),
        ("[phase1]\n  seq_len = 128\n  lr = fast\n    # more\n", "  lr", "[phase1] lr = 'fast'"),
        ("[phase1]\nLR = 1e-3\n", "LR", "[phase1] LR is not a setting; did you mean lr?"),
        ("[store]\nconnections = 4\nurl = gs://x/y\n", "url", "[store] url = gs://x/y: gs:// is unknown; allowed: s3"),
        ("[store]\nurl = s3://x/y\nkms_key = abc\n", "kms_key", "[store] kms_key = abc needs encryption = aws:kms"),
        ("[trackers]\nproject = x\nnames = wnadb\n", "names", "wnadb is not a tracker (commas separate several); did"),
        ("[trackers]\n\nnames = mlflow\n", "names", "[trackers] names = mlflow: mlflow needs an address"),
    ],
)
@pytest.mark.parametrize("name", ["luigi.cfg", "mine.cfg"])
def test_a_file_is_named_with_its_line(tmp_path: Path, text: str, fragment: str, message: str, name: str) -> None:
    """The luigi.cfg of the current directory, or the one that LUIGI_CONFIG_PATH names."""
    (tmp_path / name).write_text(text)
    done = run(tmp_path, overlay=None if name == "luigi.cfg" else name)
    assert_one_line_error(done, message, f"{name}:{at(text, fragment)})", status=35)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "luigi.cfg").write_text("[run]\n")
    (tmp_path / "mine.cfg").write_bytes("[card]\ndatasets = caf\xe9/x\n".encode("latin-1"))
    done = run(tmp_path, "-m", "pipeline", "status", overlay="mine.cfg")
    assert_one_line_error(done, "error: mine.cfg is not UTF-8", "save it in that encoding", status=35)


def test_the_one_that_counts_is_named(tmp_path: Path) -> None:
    """LUIGI_CONFIG_PATH wins over luigi.cfg, and the command line over both."""
    (tmp_path / "luigi.cfg").write_text("[phase1]\nlr = slow\n")
    (tmp_path / "mine.cfg").write_text("\n\n[phase1]\nlr = fast\n")
    assert_one_line_error(run(tmp_path, overlay="mine.cfg"), "lr = 'fast'", "(mine.cfg:4)", status=35)
    done = run(tmp_path, *LUIGI, "--Phase1-lr", "nan", overlay="mine.cfg")
    assert_one_line_error(done, "lr = nan", "(the command line)", status=35)


def test_settings_that_do_not_agree_are_each_named_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "luigi.cfg").write_text("[phase1]\nwarmup_steps = 30\n")
    done = run(tmp_path, *LUIGI, "--Phase1-max-steps", "20")
    assert_one_line_error(done, "(warmup_steps: luigi.cfg:2, max_steps: the command line)", status=35)
    done = run(tmp_path, *LUIGI, "--Phase1-max-steps", "30", "--Phase1-schedule", "wsd")
    said = "[phase1] warmup_steps = 30 is more than the 24 steps before the decay of schedule = wsd"
    assert_one_line_error(done, said, status=35)


def test_settings_of_two_sections_are_each_named_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "luigi.cfg").write_text("[precision]\nmode = fp32\n[phase1]\noptimizer = AdamW_FP32ParamsCopy\n")
    said = "[phase1] optimizer = AdamW_FP32ParamsCopy, [precision] mode = fp32: optimizer AdamW_FP32ParamsCopy means"
    assert_one_line_error(run(tmp_path), said, "(optimizer: luigi.cfg:4, mode: luigi.cfg:2)", status=35)


def test_a_file_is_read_as_configparser_reads_it() -> None:
    """Random lines, indented at random; only empty lines within a value may differ."""
    draw, read = random.Random(0), 0
    for _ in range(2000):
        lines = ["[a]"]
        for _ in range(draw.randint(1, 9)):
            key = draw.choice(["b", "c", "long_key", "D"])
            forms = [f"{key} = {draw.randint(0, 9)}", f"{key}: w", "", "# c", "more = x", "word", "[e]", f"{key} ="]
            lines.append(draw.choice(["", "  ", "    "]) + draw.choice(forms))
        text, parser = "\n".join(lines), configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        read += 1
        found = {(entry.section, entry.key): entry.value for entry in entries(text) if entry.key}
        expected = {(name, key): value for name in parser.sections() for key, value in parser.items(name)}
        assert found == {at: "\n".join(filter(None, value.split("\n"))) for at, value in expected.items()}, text
    assert read > 1000


def test_a_default_has_no_place(tmp_path: Path) -> None:
    """warmup_steps = 50 is the project's own."""
    done = run(tmp_path, *LUIGI, "--Phase1-max-steps", "20")
    assert_one_line_error(done, "warmup_steps = 50 is more than max_steps = 20", status=35)
    assert done.stderr.strip().endswith("(max_steps: the command line)")


@pytest.mark.parametrize("command", ["luigi", "-m pipeline status"])
def test_a_file_that_cannot_be_read_is_not_passed_over(tmp_path: Path, command: str) -> None:
    """A run with the defaults instead would end with 0."""
    (tmp_path / "luigi.cfg").symlink_to("luigi.cfg")
    words = LUIGI if command == "luigi" else command.split()
    assert_one_line_error(run(tmp_path, *words), "luigi.cfg cannot be read: Too many levels", status=35)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[phase1]\nlr = 1\nlr = 2\n", "[line 3]: option 'lr' in section 'phase1' already exists"),
        ("lr = 1\n", "contains no section headers"),
        ("[phase1\n", "contains no section headers"),
    ],
)
def test_a_file_that_is_no_settings_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "luigi.cfg").write_text(text)
    assert_one_line_error(run(tmp_path, "-m", "pipeline", "status"), message, "luigi.cfg", status=35)
