"""The model card: README.md beside the model, in the format of the Hugging Face Hub.

It is made to be published, so it shows only the last part of local paths. The card ends with a sha256 of its text, so
that an edited card is detected and left alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re

from common.markdown import table
from stages.view import facts
from stages.view.metadata import metadata, words
from stages.view.run import Run, Settings
from stages.view.text import moment

CARD = "README.md"
#: The model's name if it has no other.
NAME = "bert-pretraining"
_SEAL = re.compile(r"<!-- made by the pipeline, sha256 ([0-9a-f]{64}); once edited it is not replaced -->\n\Z")
#: Settings that list several files.
_LISTS = ("source", "held_out_source")
#: Sections and settings that tell where it was trained, not what was trained; and the metadata's own.
_NOT_SHOWN = ("run", "card")
_KEYS_NOT_SHOWN = ("master_addr", "master_port", "node_rank", "s3_profile", "s3_endpoint")
_ADDRESS = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*://")


def card(run: Run, name: str = NAME, path: str = "PATH") -> str:
    """Render the card: metadata, then data, results, settings and versions, as Markdown. `path`: where
    `from_pretrained` finds the model."""
    heading = f"---\n{metadata(run, name).to_yaml()}\n---\n\n"
    run = dataclasses.replace(run, settings=_public(run.settings))
    counts = run.counts("evaluate")
    parts = [
        "# BERT, pretrained in two phases",
        _introduction(run),
        "## Use",
        f"```python\n{facts.usage(run, path)}\n```",
        table(("held-out text", "answer", "probability"), facts.prompts_table(counts)),
        *_section("Data", table(("", ""), facts.data_table(run))),
        *_section("Results", table(("training", *(f"phase {p}" for p in run.curves)), facts.training_table(run))),
        table(("on held-out examples", ""), facts.evaluation_table(counts)),
        *_section(
            "Settings", *(f"### {title}\n\n{table(head, rows)}" for title, head, rows in facts.settings_tables(run))
        ),
        *_section("Versions", table(("", ""), facts.versions(run))),
        f"Made {moment(_made(run))}.",
    ]
    body = "\n\n".join(part for part in parts if part)
    text = f"{heading}{body}\n\n"
    return f"{text}<!-- made by the pipeline, sha256 {_digest(text)}; once edited it is not replaced -->\n"


def is_edited(text: str) -> bool:
    """Whether a card differs from what the pipeline wrote."""
    seal = _SEAL.search(text)
    return seal is None or seal[1] != _digest(text[: seal.start()])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _public(settings: Settings) -> Settings:
    return {
        section: {key: _without_folders(key, text) for key, text in keys.items() if key not in _KEYS_NOT_SHOWN}
        for section, keys in settings.items()
        if section not in _NOT_SHOWN
    }


def _without_folders(key: str, text: str) -> str:
    """The last part of a local path, or of each if a setting lists several; addresses stay."""
    paths = words(text) if key in _LISTS else [text]
    return " ".join(path if _ADDRESS.match(path) else path.rstrip("/").rpartition("/")[2] for path in paths)


def _made(run: Run) -> float:
    """When the last of its stages ended, so that the card of a model is the same whenever it is written; Unix time."""
    return max((attempt.ended for stage in run.stages for attempt in stage.attempts), default=run.written)


def _introduction(run: Run) -> str:
    parameters = run.counts("merge_shards").get("parameters")
    size = f" with {parameters:,} parameters" if parameters else ""
    phases = " and ".join(
        f"{len(curves.steps):,} steps on sequences of {run.setting(phase, 'seq_len')} tokens"
        for phase, curves in run.curves.items()
    )
    trained = f", trained for {phases}" if phases else ""
    architecture = facts.architecture(run)
    does = "it fills in masked words"
    if architecture == "BertForPreTraining":
        does += " and tells whether a sentence follows another"
    return (
        f"A `{architecture}`{size}{trained}: {does}. "
        f"It was made by the BERT pretraining pipeline and has not been fine-tuned."
    )


def _section(title: str, *parts: str) -> list[str]:
    return [f"## {title}", *parts] if any(parts) else []
