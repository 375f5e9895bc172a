"""Choose the night that this one continues, and take over what it needs, durably, before anything else starts."""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.console import log
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, fresh_directory, rename_durably, sha256_of, write_json
from pipeline.settings.sections import Settings
from pipeline.status.stage_dirs import StageDir, StageDirs
from pipeline.tasks.extension import copy_file, link_files
from pipeline.tasks.nights import parent as names
from pipeline.tasks.nights.parent import PARENT, RECORD, Parent
from stages.embed import RANDOM
from stages.text.corpus import HELD_OUT_TOKEN_FILES, TOKENIZER
from trainer.checkpoint.directory import CHECKPOINTS, MANIFEST, whole_checkpoints, why_invalid
from trainer.checkpoint.stable import stable_step
from trainer.data.file_names import HELD_OUT_SHARDS
from trainer.models.config import ModelConfig
from trainer.registry import STABLE_SCHEDULES, stable_steps
from trainer.state import TrainState

#: A night's settings, in its directory; set LUIGI_CONFIG_PATH to it for `python -m pipeline status` and `why`.
CONFIG = "night.cfg"
#: Settings that affect the vocabulary, the checkpoint's moments, or what is held out and how it is measured.
_MUST_AGREE = (
    ("corpus", "lower_case"), ("corpus", "document"), ("corpus", "vocab_size"), ("dataset", "next_sentence"),
    ("phase1", "optimizer"), ("phase2", "max_pred_len"), ("evaluation", "max_samples"),
)  # fmt: skip

Texts = Mapping[str, Mapping[str, str]]


def require_possible(settings: Settings) -> None:
    """Raise `UserError` if nights with these settings cannot continue each other."""
    phase1, corpus = settings.phase1, settings.corpus
    given = "[nights] start_from = previous"
    if not stable_steps(phase1.schedule, max_steps=phase1.max_steps, decay_share=phase1.decay_share):
        raise UserError(
            f"{given} continues a checkpoint from before the learning rate's decay, and [phase1] schedule = "
            f"{phase1.schedule} decays from the start; allowed: {', '.join(STABLE_SCHEDULES)}"
        )
    if phase1.schedule == "constant" and phase1.minimal_ckpt:
        raise UserError(
            f"{given} needs the optimizer's state of the last checkpoint; set [phase1] minimal_ckpt = false"
        )
    if settings.phase2.start_from:
        raise UserError(f"{given} continues phase 1, which [phase2] start_from leaves out; leave one of them empty")
    if settings.dataset.phase1_url:
        raise UserError(f"{given} needs text, with its vocabulary and documents; leave [dataset] phase1_url empty")
    if not corpus.held_out and not corpus.held_out_source:
        raise UserError(f"{given} needs text to evaluate on; set [corpus] held_out or held_out_source")


@dataclass(frozen=True)
class Candidate:
    """A complete night that can be continued."""

    directory: Path
    #: Its chain's stages, by label.
    stages: dict[str, StageDir]
    checkpoint: Path

    @property
    def parent(self) -> Parent | None:
        """The night that this one continued."""
        return Parent.read(self.directory / PARENT) if "start_from" in self._pretrain.record["inputs"] else None

    @property
    def _pretrain(self) -> StageDir:
        return self.stages["pretrain-phase1"]

    @property
    def files(self) -> dict[str, Path]:
        """What is copied, by its path in the folder `parent`."""
        tokens, shards, before = (
            self.stages["tokenize_corpus"].path,
            self.stages["shard_dataset-phase2"].path,
            self.parent,
        )
        held_out = before.held_out if before else shards
        token_files = (before.held_out_tokens if before else tokens).glob(HELD_OUT_TOKEN_FILES)
        return {
            names.VOCABULARY: tokens / TOKENIZER / names.VOCABULARY,
            **{f"{names.HELD_OUT}/{path.name}": path for path in sorted(held_out.glob(HELD_OUT_SHARDS))},
            **{f"{names.HELD_OUT_TOKENS}/{path.name}": path for path in sorted(token_files)},
        }

    def record(self, settings: Texts) -> dict[str, Any]:
        state = TrainState.read(self.checkpoint)
        return {
            "night": self.directory.name, "checkpoint": self.checkpoint.name, "steps": state.optimizer_steps,
            "training": self._pretrain.fingerprint, "model": state.model, "precision": state.precision,
            "settings": {f"[{section}] {key}": settings[section][key] for section, key in _MUST_AGREE},
        }  # fmt: skip


def _candidate(night: Path) -> Candidate | str:
    """The complete night in the directory `night`, or why it cannot be continued."""
    found = {one.label: one for one in StageDirs(night).evaluated_chain()}
    for label in ("tokenize_corpus", "shard_dataset-phase2", "pretrain-phase1"):
        if label not in found:
            return f"its {label} is gone"
    steps = {
        path: step
        for _, path in whole_checkpoints(found["pretrain-phase1"].path / CHECKPOINTS)
        if (step := stable_step(path)) is not None
    }
    if not steps:
        return "it has no checkpoint with the optimizer's state from before the learning rate's decay"
    checkpoint = max(steps, key=lambda path: steps[path])
    candidate = Candidate(night, found, checkpoint)
    if any(key not in _settings_of(night).get(section, {}) for section, key in _MUST_AGREE):
        return "its settings (night.cfg) are gone"
    if not any(name.startswith(f"{names.HELD_OUT}/") for name in candidate.files):
        return "it held out nothing to evaluate on"
    return candidate


def _candidates(accepted: Sequence[Path]) -> Iterator[Candidate]:
    """Those of the `accepted` nights that can be continued, in order; others are logged."""
    for night in accepted:
        found = _candidate(night)
        if isinstance(found, str):
            log(f"note: night {night.name} cannot be continued: {found}")
        else:
            yield found


def decided(night: Path) -> Parent | None:
    """The night that the one in the directory `night` continues, if it has been decided and there is one."""
    return Parent.read(night / PARENT) if (night / PARENT / RECORD).exists() else None


def require_agreement(settings: Settings, texts: Texts, night: Path, accepted: Sequence[Path]) -> None:
    """Raise `UserError` if the night in the directory `night` cannot continue the one that it would. Changes nothing,
    and reads no checkpoint whole: `take_over` may find a damaged one, and then asks the next to agree.

    `texts`: `settings` as in a night's file. `accepted`: the earlier nights, newest first.
    """
    if (night / PARENT / RECORD).exists():
        parent = decided(night)
        if parent is not None:
            _require_agreement(settings, texts, parent.record, parent.vocabulary)
        return
    for found in _candidates(accepted):
        require_candidate(settings, texts, found)
        return


def take_over(night: Path, accepted: Sequence[Path], require: Callable[[Candidate], object]) -> Parent | None:
    """Decide, once, what the night in the directory `night` continues: the first of `accepted` that is whole.

    None: it trains from the start. A night that was interrupted keeps what was decided. Raises `DiskError`, and what
    `require` raises for the one that was found.
    """
    if (night / PARENT / RECORD).exists():
        return decided(night)
    final, temporary = night / PARENT, night / f"{PARENT}{TEMPORARY_SUFFIX}"
    with disk_errors(final):
        fresh_directory(temporary)
        for found in _candidates(accepted):
            reason = why_invalid(found.checkpoint)
            if reason is None:
                require(found)
                _fill(temporary, found)
                break
            log(f"note: night {found.directory.name} cannot be continued: {found.checkpoint}: {reason}")
        else:
            write_json(temporary / RECORD, {"night": None})
            log(f"night {night.name}: no earlier night to continue: trains from scratch")
    rename_durably(temporary, final)
    return decided(night)


def _fill(directory: Path, found: Candidate) -> None:
    checkpoint = f"{names.CHECKPOINT}/{found.checkpoint.name}"
    link_files(found.checkpoint, directory / checkpoint)
    sha256 = {}
    for name, path in found.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        sha256[name] = copy_file(path, directory / name)
    sha256[f"{checkpoint}/{MANIFEST}"] = sha256_of(directory / checkpoint / MANIFEST)
    write_json(directory / RECORD, {**found.record(_settings_of(found.directory)), "sha256": sha256})


def overrides(parent: Parent | None) -> dict[str, dict[str, str]]:
    """The settings of a night that continues `parent`: its learning rate is already at its peak, its vocabulary and
    held-out documents are given."""
    if parent is None:
        return {}
    return {
        "run": {"start_from": str(parent.directory)},
        "corpus": {"vocab_file": str(parent.vocabulary), "held_out": "0", "held_out_source": ""},
        "phase1": {
            "warmup_steps": "0",
            "batch_ramp_steps": "0",
            "word_embeddings": RANDOM,
            "initial_attention": RANDOM,
        },
    }


def _settings_of(night: Path) -> Texts:
    """The settings that a night was run with; those that its file lacks are missing."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(night / CONFIG, encoding="utf-8")
    return {section: dict(config.items(section)) for section in config.sections()}


def require_candidate(settings: Settings, texts: Texts, found: Candidate) -> None:
    """Raise `UserError` if a night with `settings` cannot continue the one that was found."""
    _require_agreement(settings, texts, found.record(_settings_of(found.directory)), found.files[names.VOCABULARY])


def _require_agreement(settings: Settings, texts: Texts, record: dict[str, Any], vocabulary: Path) -> None:
    """Raise `UserError` if tonight's settings contradict those with which the night in `record` can be continued."""
    theirs = ModelConfig.of_hugging_face(record["model"])
    mine = settings.model.config(theirs.vocab_size)
    pairs = {
        f"[model] {field.name}": (getattr(mine, field.name), getattr(theirs, field.name))
        for field in dataclasses.fields(ModelConfig)
        if "dropout" not in field.name and field.name != "next_sentence"
    }
    pairs |= {f"[{at}] {key}": (texts[at][key], record["settings"][f"[{at}] {key}"]) for at, key in _MUST_AGREE}
    if settings.precision.mode != "auto":
        pairs["[precision] mode"] = (settings.precision.mode, record["precision"])
    given = texts["corpus"]["vocab_file"]
    if given:
        del pairs["[corpus] vocab_size"]
        if _pieces(Path(given)) != _pieces(vocabulary):
            pairs["[corpus] vocab_file"] = (given, "vocabulary")
    for name, (mine_, theirs_) in pairs.items():
        if mine_ != theirs_:
            raise UserError(
                f"{name} = {mine_} is not the {theirs_} of night {record['night']}, which this one continues; set it "
                f"back, or train from scratch with [nights] start_from empty; nothing was started"
            )


def _pieces(vocabulary: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return vocabulary.read_text(encoding="utf-8", errors="replace").split()
    raise UserError(f"cannot read the vocabulary {vocabulary}; check [corpus] vocab_file")
