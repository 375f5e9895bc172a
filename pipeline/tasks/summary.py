"""The few lines at the end of a run: what was made, where it is, how good it is, what to do next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.tasks.bert import ConvertCheckpoint, MergeShards, Pretrain, Report
    from pipeline.tasks.stage import Stage


def _loss(pretrain: Pretrain) -> str:
    if not pretrain.complete():
        return f"phase {pretrain.phase}: {pretrain.directory} was removed; the model made from it is still there"
    counts = pretrain.counts()
    return (
        f"phase {pretrain.phase}: {counts['steps']} steps, loss {_number(counts, 'first_loss')} → "
        f"{_number(counts, 'loss')} (mean of the last 50: {_number(counts, 'mean_loss_last_50')}), "
        f"{_number(counts, 'throughput_average', '.0f')} sequences/s"
    )


def _number(counts: dict[str, Any], name: str, form: str = ".3f") -> str:
    """A result; a phase whose metrics.jsonl was lost has it as null."""
    value = counts.get(name)
    return "not recorded" if value is None else format(value, form)


def _start(convert: ConvertCheckpoint) -> str:
    counts = convert.counts()
    return f"phase 1: left out; step {counts['global_step']:,} of {convert.given} ({counts['format']}) in its place"


def tell_phase1(convert: ConvertCheckpoint, pretrain: Pretrain, say: Callable[[str], None]) -> None:
    say(f"Phase 1 is complete.\n  {_start(convert) if convert.given else _loss(pretrain)}")
    say(f"  checkpoint: {convert.directory / 'checkpoint'}")
    say("  next: luigi --module pipeline BertPhase2")


def tell_phase2(
    merged: MergeShards, phases: list[Pretrain], evaluate: Stage, report: Report, say: Callable[[str], None]
) -> None:
    say("BERT is pretrained.")
    convert = phases[-1].requires()["start"]
    if len(phases) == 1 and convert.complete():
        say(f"  {_start(convert)}")  # type: ignore[arg-type]
    for pretrain in phases:
        say(f"  {_loss(pretrain)}")
    counts = evaluate.counts()
    if counts["samples"]:
        say(
            f"  held out ({counts['samples']} sequences): masked-LM accuracy {counts['masked_lm_accuracy']:.1%}, "
            f"loss {counts['masked_lm_loss']:.3f}; next-sentence accuracy {counts['next_sentence_accuracy']:.1%}"
        )
    else:
        say("  held out: the data set has no *_test_* shards, so nothing was measured")
    say(f"  model: {merged.model_directory}")
    say("  curves: python -m pipeline tensorboard")
    say(f"  report: {report.page}")
    say('  next: python -m pipeline try "The answer is [MASK]."')


def tell_mlp(trained: dict[str, Any], evaluated: dict[str, Any], checkpoint: Path, say: Callable[[str], None]) -> None:
    say("The MLP is trained.")
    say(
        f"  {trained['steps']} steps with {trained['num_workers']} worker(s), loss {_number(trained, 'first_loss')} → "
        f"{_number(trained, 'loss', '.4f')} (mean of the last 50: {_number(trained, 'mean_loss_last_50', '.4f')})"
    )
    say(
        f"  held out ({evaluated['images']} images): accuracy {evaluated['accuracy']:.2%}, loss {evaluated['loss']:.4f}"
    )
    say(f"  checkpoint: {checkpoint}")
