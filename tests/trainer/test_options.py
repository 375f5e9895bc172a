"""The command line and its page in the docs are made from the fields that define the options."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.options import fields_of, name_of
from tests.helpers.support import ROOT, options, write_dataset, write_model_config
from trainer.config import TrainConfig
from trainer.metrics.trackers.options import TrackerOptions
from trainer.options import RunOptions, markdown, parse, parser, to_config
from trainer.parallel.mesh import Mesh
from trainer.workloads import WORKLOADS


def test_the_page_of_options_is_made_from_the_fields() -> None:
    wanted = markdown()
    assert (ROOT / "docs" / "options.md").read_text() == wanted, "python -m trainer.options > docs/options.md"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_help_has_every_option_of_the_workload_with_its_default(workload: str) -> None:
    kind = WORKLOADS[workload]
    shown = " ".join(parser(workload).format_help().split())
    known = {}
    for cls in (RunOptions, kind.options, TrainConfig, TrackerOptions):
        known |= {name: (cls, *found) for name, found in fields_of(cls).items() if found[1].names is not None}
    assert {*kind.defaults, *kind.without} <= set(known)
    for name, (cls, field, about) in known.items():
        if name in kind.without:
            assert f"{name_of(cls, name)} " not in shown
            continue
        default = kind.defaults.get(name, field.default)
        text = f"{about.help} ({default})" if type(default) in (int, float, str) and default != "" else about.help
        # argparse breaks long words at hyphens.
        assert " ".join(text.split()).replace("- ", "-") in shown.replace("- ", "-"), name


def test_defaults_are_the_workloads(tmp_path: Path) -> None:
    assert parse([]).config == TrainConfig()
    given = parse(["--workload", "mnist", "--lr", "0.1"])
    assert (given.config.lr, given.config.micro_batch_size, given.run.shards_per_ckpt) == (0.1, 32, 0)
    assert given.config.grad_accum_usteps == 1


@pytest.mark.parametrize(("shards_per_ckpt", "steps"), [(1, 4), (3, 11), (0, 0)])
def test_checkpoints_are_as_many_shards_apart_as_was_asked(tmp_path: Path, shards_per_ckpt: int, steps: int) -> None:
    """Two workers read shards of 30 rows on average, in steps of 16: 60 / 16 = 3.75 steps."""
    words = options(
        data_dir=write_dataset(tmp_path / "data", [40, 20]), model_config=write_model_config(tmp_path), batch_size=4,
        grad_accum_usteps=2, max_pred_len=5, shards_per_ckpt=shards_per_ckpt, output_dir=tmp_path / "out",
    )  # fmt: skip
    config, _ = to_config(parse(words), Mesh(world_size=2, local_world_size=2))
    assert config.ckpt_interval_steps == steps


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "fast"], "--lr is fast; allowed: a number 0 or more"),
        (["--collective_timeout=0"], "--collective_timeout is 0.0; allowed: a number 1 or more"),
        (["--workload", "gpt"], "--workload is gpt; allowed: bert, mnist"),
        (["--precision", "fp32", "--enable_pt_autocast"], "exclude each other"),
        (["--warmup_steps", "9", "--max_steps", "8"], "warmup_steps = 9 is more than max_steps = 8; lower it"),
        (
            ["--warmup_steps", "81", "--max_steps", "100", "--schedule", "wsd"],
            "warmup_steps = 81 is more than the 80 steps before the decay of schedule = wsd, with decay_share = 0.2 "
            "and max_steps = 100; lower it",
        ),
    ],
)
def test_a_bad_value_is_one_line_with_what_is_allowed(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(words)
