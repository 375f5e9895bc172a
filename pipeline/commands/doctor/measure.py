"""A short run of the whole chain in a folder of its own, with a few steps and little text: its manifests show this
machine's rates."""

from __future__ import annotations

import configparser
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from luigi.cmdline_parser import CmdlineParser
from luigi.configuration import get_config

from common.console import log
from common.errors import UserError, existing_parent
from common.hashing import InputHashes
from pipeline.commands.doctor.finding import Plan
from pipeline.settings.sections import SECTIONS, section_name
from pipeline.status.stage_dirs import StageDirs
from pipeline.tasks.dataset import DownloadDataset
from stages.text.base import PACKED
from stages.text.corpus import BLANK_LINE, BUILTIN, find_files, kind_of, open_sources, raw_documents
from stages.text.patterns import split
from stages.text.plain import PlainTextSource

#: Bytes of text, optimizer steps, micro-steps per step, and held-out sequences of the short run.
_TEXT_BYTES, _STEPS, _USTEPS, _SAMPLES = 4 << 20, 8, 2, 200
#: Documents that a sample of the text must have: two to train on, and two held out.
_DOCUMENTS = 4
#: [cluster] of a machine that runs without the others.
_ALONE = {"nnodes": "1", "build_nodes": "1", "node_rank": "0", "master_addr": ""}
#: Settings by section, as text.
_Overlay = dict[str, dict[str, str]]


@contextlib.contextmanager
def measured(plan: Plan) -> Iterator[StageDirs]:
    """The stages of the short run, removed after the block. Raises `UserError` if it fails."""
    place = existing_parent(plan.settings.work_dir)
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=place, ignore_cleanup_errors=True) as name:
        folder, goal = Path(name), _goal(plan)
        _write(folder / "short.cfg", _given(), _changed(plan, folder), _text(plan, folder))
        log(f"a short run of {goal}, to measure this machine's rates; Ctrl-C stops it")
        done = subprocess.run(
            [sys.executable, "-m", "luigi", "--module", "pipeline", goal], capture_output=True, text=True, check=False,
            env={**os.environ, "LUIGI_CONFIG_PATH": str(folder / "short.cfg")},
        )  # fmt: skip
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line or "failed" in line]
            raise UserError(f"it ended with exit status {done.returncode}: {said[-1] if said else done.stderr[-300:]}")
        yield StageDirs(folder / "work")


def _goal(plan: Plan) -> str:
    return "MnistMlp" if any(stage.stage == "train_mlp" for stage in plan.stages()) else "BertPhase2"


def _write(path: Path, *overlays: _Overlay) -> None:
    """Write the settings of this process, overridden by those of `overlays`."""
    config = configparser.RawConfigParser()
    config.optionxform = str  # type: ignore[assignment, method-assign]
    ours = get_config()
    config.read_dict({section: dict(ours.items(section, raw=True)) for section in ours.sections()})
    for overlay in overlays:
        escaped = {
            section: {key: value.replace("%", "%%") for key, value in values.items()}
            for section, values in overlay.items()
        }
        config.read_dict(escaped)
    with path.open("w", encoding="utf-8") as file:
        config.write(file)


def _given() -> _Overlay:
    """The settings of this command line."""
    parser = CmdlineParser.get_instance()
    assert parser is not None
    found: _Overlay = {}
    for section in SECTIONS:
        for name, _ in section.get_params():
            value = getattr(parser.known_args, f"{section.__name__}_{name}", None)
            if value is not None:
                found.setdefault(section_name(section), {})[name] = value
    return found


def _changed(plan: Plan, folder: Path) -> _Overlay:
    """The settings in which the short run differs."""
    settings, cluster = plan.settings, plan.settings.cluster
    # Machines started by hand would each have to start the short run: it takes this one alone.
    is_alone = cluster.launcher == "local" and cluster.nnodes > 1
    copies = cluster.data_parallel_size // (cluster.nnodes if is_alone else 1)
    found: _Overlay = {
        "core": {"local_scheduler": "true"},
        "run": {"work_dir": str(folder / "work")},
        "cluster": dict(_ALONE) if is_alone else {},
        "store": {"url": ""},
        "trackers": {"names": ""},
        "dataset": {"shards": str(min(4, settings.dataset.shards))},
        "corpus": {"max_unknown_share": "1"},
        "evaluation": {"max_samples": str(min(_SAMPLES, settings.evaluation.max_samples)), "blimp": ""},
        "mnist": {"epochs": "1"},
        "nights": {"webhook": ""},
    }
    for number in (1, 2):
        phase = settings.phase(number)
        unit = phase.micro_batch_size * copies * cluster.batches_per_execution
        batch = min(phase.global_batch_size, _USTEPS * unit)
        found[f"phase{number}"] = {
            "max_steps": str(_STEPS), "warmup_steps": "0", "budget": "", "batch_ramp_steps": "0",
            "ckpt_interval_steps": "0", "global_batch_size": str(batch),
        }  # fmt: skip
    found["phase2"]["start_from"] = ""
    return found


def _text(plan: Plan, folder: Path) -> _Overlay:
    """The beginning of the text, if it is plain; else text that ships with Python, for a model of the same size."""
    settings = plan.settings
    if any(isinstance(stage, DownloadDataset) for stage in plan.stages()):
        no_urls = {f"phase{number}_{what}": "" for number in (1, 2) for what in ("url", "sha256")}
        return {
            "corpus": {"source": BUILTIN, "held_out_source": "", "held_out": "0.05", "vocab_file": ""},
            "dataset": no_urls,
            "model": {"vocab_size": str(settings.model.downloaded_vocab_size)},
        }
    files, sample = find_files(split(settings.corpus.source)), folder / "sample.txt"
    is_sampled = all(map(_is_plain, files)) and _has_documents(_write_sample(sample, files))
    source = shlex.quote(str(sample)) if is_sampled else BUILTIN
    return {"corpus": {"source": source, "document": BLANK_LINE, "held_out_source": "", "held_out": "0.05"}}


def _is_plain(name: str) -> bool:
    return name != BUILTIN and kind_of(name) is PlainTextSource and not name.endswith(PACKED)


def _write_sample(sample: Path, files: Iterable[str]) -> Path:
    """Write the first `_TEXT_BYTES` of all files together, with a blank line after each."""
    with sample.open("wb") as file:
        for name in files:
            with open(name, "rb") as text:
                file.write(text.read(_TEXT_BYTES - file.tell()).decode("utf-8", errors="ignore").encode() + b"\n\n")
            if file.tell() >= _TEXT_BYTES:
                break
    return sample


def _has_documents(sample: Path) -> bool:
    """Whether it has as many as training and evaluation need; a text may be few files, each one document."""
    found = raw_documents(open_sources([str(sample)], InputHashes()), Counter())
    return len(list(islice(found, _DOCUMENTS))) == _DOCUMENTS
