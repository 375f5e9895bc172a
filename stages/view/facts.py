"""The figures of a run and their names, shared by the report, the model card and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.files import read_json
from common.secrets import redact
from stages.directory.records import DATA_CARD
from stages.view.goodput import goodput_of
from stages.view.run import Run
from stages.view.text import duration, number, percent, size

#: Title, header and rows.
Table = tuple[str, tuple[str, ...], list[list[str]]]


def _nats(value: float) -> str:
    return f"{number(value)} nats"


#: The rows of the evaluation: title, count, format.
_EVALUATION: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("masked-LM accuracy", "masked_lm_accuracy", percent),
    ("of the 100 most frequent pieces", "masked_lm_accuracy_frequent", percent),
    ("of the next 900", "masked_lm_accuracy_common", percent),
    ("of all others", "masked_lm_accuracy_rare", percent),
    ("by frequency alone", "unigram_accuracy", percent),
    ("masked-LM loss", "masked_lm_loss", _nats),
    ("by frequency alone", "unigram_loss", _nats),
    ("bits per character", "bits_per_character", number),
    ("next-sentence accuracy", "next_sentence_accuracy", percent),
    ("next-sentence loss", "next_sentence_loss", _nats),
    ("BLiMP (chance: 50%)", "blimp_accuracy", percent),
    ("pairs of BLiMP", "blimp_pairs", number),
    ("sequences", "samples", number),
    ("masked tokens", "masked_tokens", number),
)


def architecture(run: Run) -> str:
    """The Hugging Face class of the merged model."""
    config = None if run.model is None else read_json(run.model / "config.json")
    return str(config["architectures"][0]) if config else "BertForPreTraining"


def usage(run: Run, path: str) -> str:
    """Python code that loads the merged model at `path`."""
    model = architecture(run)
    return (
        f"from transformers import {model}, BertTokenizerFast\n\n"
        f'model = {model}.from_pretrained("{path}")\n'
        f'tokenizer = BertTokenizerFast.from_pretrained("{path}")'
    )


def span(run: Run, phase: int) -> tuple[int, int]:
    """First and last optimizer step of a phase that has begun, planned steps included."""
    steps = run.curves[phase].steps
    planned = run.planned_steps(phase)
    return steps[0], max(steps[-1], steps[0] - 1 + planned) if planned else steps[-1]


def at_a_glance(run: Run) -> list[tuple[str, str, str]]:
    """The key figures: (name, value, remark)."""
    found = []
    for phase, curves in run.curves.items():
        first, last = span(run, phase)
        done, planned = curves.steps[-1] - first + 1, last - first + 1
        steps = f"{done:,} steps" if done == planned else f"step {done:,} of {planned:,}"
        began = number(curves.values["loss"][0])
        found.append((f"loss, phase {phase}", number(curves.recent("loss")), f"mean of 50, from {began}; {steps}"))
    counts = run.counts("evaluate")
    if counts.get("samples"):
        held_out = f"held out, {counts['samples']:,} sequences"
        baseline = counts.get("unigram_accuracy")
        against = held_out if baseline is None else f"held out; {percent(baseline)} by frequency alone"
        found.append(("masked-LM accuracy", percent(counts["masked_lm_accuracy"]), against))
        if "next_sentence_accuracy" in counts:
            found.append(("next-sentence accuracy", percent(counts["next_sentence_accuracy"]), held_out))
    at_work = sum(stage.seconds_at_work for stage in run.stages)
    if at_work:
        stopped = sum(stage.stops for stage in run.stages)
        times = "never stopped" if not stopped else f"stopped {stopped} time{'s' if stopped > 1 else ''}"
        found.append(("at work", duration(at_work), times))
    parameters = run.counts("merge_shards").get("parameters")
    if parameters:
        found.append(("parameters", f"{parameters / 1e6:,.1f} M", f"{size(run.model_bytes)} on disk"))
    return found


def training_table(run: Run) -> list[list[str]]:
    """Rows of (name, value per phase) on the training runs."""
    rows: list[list[str]] = []
    if not run.curves:
        return rows

    def row(name: str, values: Sequence[str | None]) -> None:
        if any(values):
            rows.append([name, *(value or "–" for value in values)])

    curves, counts = run.curves, {phase: run.counts(f"pretrain-phase{phase}") for phase in run.curves}
    row("optimizer steps", [f"{len(one.steps):,}" for one in curves.values()])
    row("loss, first step", [number(one.values["loss"][0]) for one in curves.values()])
    for title, name in (
        ("loss", "loss"),
        ("masked-LM loss", "masked_lm_loss"),
        ("next-sentence loss", "next_sentence_loss"),
    ):
        means = [one.recent(name) for one in curves.values()]
        row(f"{title}, mean of the last 50", [None if mean is None else number(mean) for mean in means])
    warned = ["; ".join(f"{cause} (step {step:,})" for step, cause in one.diagnoses) for one in curves.values()]
    row("warnings while training", warned)
    rates = [one.values["throughput"] for one in curves.values()]
    row("sequences per second, mean", [number(round(sum(values) / len(values), 2)) for values in rates])
    row("time at work", [duration(run.trainings[phase].seconds_at_work) for phase in curves])
    spent = [
        goodput_of(stage.directory, stage.attempts, curves[phase])
        for phase, stage in run.trainings.items()
        if phase in curves and stage.directory is not None
    ]
    row(
        "goodput: share of the time since the first start in steps that counted",
        [None if one.share is None else percent(one.share) for one in spent],
    )
    row("lost, largest first", [", ".join(f"{part} {duration(s)}" for part, s in one.losses[:3]) for one in spent])
    row("interruptions", [str(run.trainings[phase].stops) for phase in curves])
    row("workers", [number(one["num_workers"]) if "num_workers" in one else None for one in counts.values()])
    row("precision", [one.get("precision") for one in counts.values()])
    return rows


def evaluation_table(counts: Mapping[str, Any]) -> list[list[str]]:
    """Rows of (name, value) from the counts of an evaluation, without unknown values; [] if nothing was measured."""
    if not counts.get("samples") and "blimp_accuracy" not in counts:
        return []
    rows = [(title, shown, counts.get(name)) for title, name, shown in _EVALUATION]
    return [[title, shown(value)] for title, shown, value in rows if value is not None]


def blimp_table(counts: Mapping[str, Any]) -> list[list[str]]:
    """Rows of (set of BLiMP, accuracy), the worst first; [] if it was not scored."""
    by_set = counts.get("blimp_accuracy_by_set", {})
    return [[name, percent(by_set[name])] for name in sorted(by_set, key=lambda name: (by_set[name], name))]


def prompts_table(counts: Mapping[str, Any]) -> list[list[str]]:
    """Rows of (prompt, answer, probability) from the counts of an evaluation."""
    return [[one["prompt"], one["answer"], percent(one["probability"])] for one in counts.get("prompts", ())]


def data_table(run: Run) -> list[list[str]]:
    """Rows of (name, value) on the text and the examples made from it."""
    rows = []
    source = run.settings.get("corpus", {}).get("source")
    tokens = run.counts("tokenize_corpus")
    if tokens:
        if source:
            rows.append(["text", redact(source)])
        rows += [
            [name, number(tokens[key])]
            for name, key in (
                ("documents", "documents"),
                ("documents held out", "held_out_documents"),
                ("sentences", "sentences"),
                ("tokens", "tokens"),
                ("vocabulary", "vocab_size"),
            )
            if key in tokens
        ]
    for phase in (1, 2):
        url = run.settings.get("dataset", {}).get(f"phase{phase}_url")
        if run.counts(f"download_dataset-phase{phase}") and url:
            rows.append([f"ready examples, phase {phase}", redact(url)])
        made = run.counts(f"shard_dataset-phase{phase}")
        if made:
            rows.append([f"examples, phase {phase}", f"{made['training_rows']:,} + {made['test_rows']:,} held out"])
    return rows


def data_card(run: Run) -> str:
    """Where the data card of the tokens is; '' if there is none."""
    tokens = run.stage("tokenize_corpus")
    if tokens is None or tokens.directory is None or not (tokens.directory / DATA_CARD).exists():
        return ""
    return f"data card: {(tokens.directory / DATA_CARD).absolute()}"


def size_table(run: Run) -> list[list[str]]:
    """Rows of (name, size)."""
    merged = run.counts("merge_shards")
    rows = [["parameters", number(merged["parameters"])]] if "parameters" in merged else []
    rows += [[f"{stage.stage}: files", size(stage.bytes)] for stage in run.stages if stage.bytes]
    return rows


def settings_tables(run: Run) -> list[Table]:
    """Tables of settings: the two phases side by side, then each other section."""
    sections = {name: {key: redact(text) for key, text in keys.items()} for name, keys in run.settings.items()}
    found: list[Table] = []
    phases = [name for name in sections if name.endswith(("phase1", "phase2")) and sections[name]]
    by_stem: dict[str, list[str]] = {}
    for name in phases:
        by_stem.setdefault(name[:-1], []).append(name)
    for stem, names in by_stem.items():
        keys = list(dict.fromkeys(key for name in names for key in sections[name]))
        rows = [[key, *(sections[name].get(key, "") or "–" for name in names)] for key in keys]
        found.append((stem.removesuffix("phase").strip("-_ ") or "phases", ("", *(name[-6:] for name in names)), rows))
    for name, section in sections.items():
        if name not in phases and section:
            found.append((name, ("", ""), [[key, text or "–"] for key, text in section.items()]))
    return found


def versions(run: Run) -> list[list[str]]:
    """Rows of (package, version used by the complete stages); all versions if stages differ."""
    every: dict[str, list[str]] = {}
    for stage in run.stages:
        for package, version in (stage.record.get("versions") or {}).items() if stage.is_complete else ():
            if version not in every.setdefault(package, []):
                every[package].append(version)
    return [[package, ", ".join(found)] for package, found in every.items()]
