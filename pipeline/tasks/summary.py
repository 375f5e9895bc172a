"""The final summary of a run: results, quality, paths and next steps."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.console import log


def phase_line(counts: dict[str, Any], phase: int) -> str:
    """One line on a phase, from its training's counts."""
    warnings = ", ".join(f"{one['cause']} (step {one['step']})" for one in counts.get("diagnoses", ()))
    extended = counts.get("extended_from")
    origin = f" (from step {extended['step']} of {extended['directory']})" if extended else ""
    return (
        f"phase {phase}: {counts['steps']} steps{origin}, loss {_number(counts, 'first_loss')} → "
        f"{_number(counts, 'loss')} (mean of the last 50: {_number(counts, 'mean_loss_last_50')}), "
        f"{_number(counts, 'throughput_average', '.0f')} sequences/s"
        f"{warnings and f'; warnings: {warnings}'}"
    )


def print_phase1(start: str, checkpoint: Path) -> None:
    """`start`: the line on the checkpoint from which phase 2 starts."""
    log(f"Phase 1 is complete.\n  {start}")
    log(f"  checkpoint: {checkpoint}")
    log("  next: luigi --module pipeline BertPhase2")


def print_phase2(phases: Sequence[str], evaluated: dict[str, Any], model: Path, report: Path) -> None:
    """`phases`: a line on each phase. `evaluated`: the counts of Evaluate."""
    log("BERT is pretrained.")
    for line in phases:
        log(f"  {line}")
    if evaluated["samples"]:
        pairs = ""
        if "next_sentence_accuracy" in evaluated:
            pairs = f"; next-sentence accuracy {evaluated['next_sentence_accuracy']:.1%}"
        log(
            f"  held out ({evaluated['samples']} sequences): masked-LM accuracy {evaluated['masked_lm_accuracy']:.1%}, "
            f"loss {evaluated['masked_lm_loss']:.3f} ({_against_frequency(evaluated)}){pairs}"
        )
    else:
        log("  held out: the data set has no *_test_* shards, so nothing was measured")
    if "blimp_accuracy" in evaluated:
        log(f"  BLiMP: {evaluated['blimp_accuracy']:.1%} of {evaluated['blimp_pairs']:,} pairs (by chance 50%)")
    log(f"  model: {model}")
    log("  curves: python -m pipeline tensorboard")
    log(f"  report: {report}")
    if evaluated.get("prompts") == []:
        log("  prompts: no held-out one is answered right: little more than word frequencies is learned")
    log(f"  next: {_next(evaluated)}")


def _next(evaluated: dict[str, Any]) -> str:
    """A held-out prompt that the model answers right, to try; in general, if there is none."""
    prompts = evaluated.get("prompts", ())
    if not prompts:
        return 'python -m pipeline try "The answer is [MASK]."'
    best = prompts[0]
    return f"python -m pipeline try {shlex.quote(best['prompt'])} ({best['answer']}: {best['probability']:.0%})"


def print_mlp(trained: dict[str, Any], evaluated: dict[str, Any], checkpoint: Path) -> None:
    """`trained`, `evaluated`: the counts of TrainMlp and EvaluateMlp."""
    log("The MLP is trained.")
    log(
        f"  {trained['steps']} steps with {trained['num_workers']} worker(s), loss {_number(trained, 'first_loss')} → "
        f"{_number(trained, 'loss', '.4f')} (mean of the last 50: {_number(trained, 'mean_loss_last_50', '.4f')})"
    )
    log(
        f"  held out ({evaluated['images']} images): accuracy {evaluated['accuracy']:.2%}, loss {evaluated['loss']:.4f}"
    )
    log(f"  checkpoint: {checkpoint}")


def _against_frequency(evaluated: dict[str, Any]) -> str:
    """The loss compared with the unigram baseline: "1.10 nats under always guessing by frequency: 6.03, 6.4%"."""
    loss = evaluated["unigram_loss"]
    gain = loss - evaluated["masked_lm_loss"]
    return (
        f"{abs(gain):.2f} nats {'under' if gain > 0 else 'over'} always guessing by frequency: {loss:.2f}, "
        f"{evaluated['unigram_accuracy']:.1%}"
    )


def _number(counts: dict[str, Any], name: str, form: str = ".3f") -> str:
    """Format a count; it is null if the phase's metrics.jsonl was lost."""
    value = counts.get(name)
    return "not recorded" if value is None else format(value, form)
