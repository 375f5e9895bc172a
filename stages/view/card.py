"""The model card: README.md beside the model, in the format of the Hugging Face Hub.

The card ends with a sha256 of its text, so that an edited card is detected and left alone.
"""

from __future__ import annotations

import hashlib
import re

from common.markdown import table
from stages.view import facts
from stages.view.run import Run
from stages.view.text import moment

CARD = "README.md"
_SEAL = re.compile(r"<!-- made by the pipeline, sha256 ([0-9a-f]{64}); once edited it is not replaced -->\n\Z")


def card(run: Run) -> str:
    """Render the card: data, results, settings and versions, as Markdown."""
    counts = run.counts("evaluate")
    measured = bool(counts.get("samples"))
    parts = [
        _metadata(counts if measured else None),
        "# BERT, pretrained in two phases",
        _introduction(run),
        "## Use",
        f"```python\n{facts.usage(run, 'PATH')}\n```",
        table(("held-out text", "answer", "probability"), facts.prompts_table(counts)),
        *_section("Data", table(("", ""), facts.data_table(run))),
        *_section("Results", table(("training", *(f"phase {p}" for p in run.curves)), facts.training_table(run))),
        table(("on held-out examples", ""), facts.evaluation_table(counts)),
        *_section(
            "Settings",
            *(
                f"### {title}\n\n{table(head, rows)}"
                for title, head, rows in facts.settings_tables(run)
                if title != "run"  # where it ran, not what was trained
            ),
        ),
        *_section("Versions", table(("", ""), facts.versions(run))),
        f"Made {moment(run.written)}.",
    ]
    text = "\n\n".join(part for part in parts if part) + "\n\n"
    return f"{text}<!-- made by the pipeline, sha256 {_digest(text)}; once edited it is not replaced -->\n"


def is_edited(text: str) -> bool:
    """Whether a card differs from what the pipeline wrote."""
    seal = _SEAL.search(text)
    return seal is None or seal[1] != _digest(text[: seal.start()])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _metadata(counts: dict[str, float] | None) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: fill-mask", "tags:", "- bert", "- pretraining"]
    if counts is not None:
        lines += ["model-index:", "- name: bert-pretraining", "  results:", "  - task:", "      type: fill-mask"]
        lines += ["    dataset:", "      name: held-out examples", "      type: held-out", "    metrics:"]
        for name in ("masked_lm_accuracy", "masked_lm_loss", "next_sentence_accuracy", "next_sentence_loss"):
            if name in counts:
                lines += [f"    - type: {name}", f"      value: {counts[name]:.6g}"]
    return "\n".join([*lines, "---"])


def _introduction(run: Run) -> str:
    parameters = run.counts("merge_shards").get("parameters")
    size = f" with {parameters:,} parameters" if parameters else ""
    phases = " and ".join(
        f"{len(curves.steps):,} steps on sequences of {run.setting(phase, 'seq_len')} tokens"
        for phase, curves in run.curves.items()
    )
    trained = f", trained for {phases}" if phases else ""
    architecture = facts.architecture(run)
    does = "it fills masked words"
    if architecture == "BertForPreTraining":
        does += " and tells whether a sentence follows another"
    return (
        f"A `{architecture}`{size}{trained}: {does}. "
        f"It was made by the BERT pretraining pipeline and has been fine-tuned for nothing."
    )


def _section(title: str, *parts: str) -> list[str]:
    return [f"## {title}", *parts] if any(parts) else []
