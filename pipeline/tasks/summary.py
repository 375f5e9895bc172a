"""The final summary of a run: results, quality, paths and next steps."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.console import log
from stages.evaluate import blimp_line, held_out_line
from trainer.metrics.results import in_words, recorded


def phase_line(counts: dict[str, Any], phase: int) -> str:
    """One line on a phase, from its training's counts."""
    extended = counts.get("extended_from")
    origin = f" from step {extended['step']} of {extended['directory']}" if extended else ""
    return f"phase {phase}{origin}: {in_words(counts)}"


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
    log(f"  {held_out_line(evaluated)}")
    if details := _details(evaluated):
        log(f"  {details}")
    if blimp := blimp_line(evaluated):
        log(f"  {blimp}")
    log(f"  model: {model}")
    log("  curves: python -m pipeline tensorboard")
    log(f"  report: {report}")
    if evaluated.get("prompts") == []:
        log("  prompts: no held-out one is answered correctly: little more than word frequencies was learned")
    for one in evaluated.get("answers", ()):
        verdict = "right" if one["answer"] == one["truth"] else f"the text has: {one['truth']}"
        log(f'  "{one["prompt"]}"\n      {one["answer"]} ({one["probability"]:.0%}; {verdict})')
    log(f"  next: {_next(evaluated)}")


def _details(evaluated: dict[str, Any]) -> str:
    """Accuracy by the pieces' frequency and bits per character, as far as they were measured."""
    classes = {"frequent": "the 100 most frequent pieces", "common": "the next 900", "rare": "the rest"}
    shares = {of: evaluated.get(f"masked_lm_accuracy_{name}") for name, of in classes.items()}
    accuracies = ", ".join(f"{share:.1%} on {of}" for of, share in shares.items() if share is not None)
    bits = evaluated.get("bits_per_character")
    found = [f"accuracy {accuracies}" if accuracies else "", "" if bits is None else f"{bits:.2f} bits per character"]
    return "; ".join(filter(None, found))


def _next(evaluated: dict[str, Any]) -> str:
    """A held-out prompt that the model answers right, to try; a general one if there is none."""
    prompts = evaluated.get("prompts", ())
    if not prompts:
        return 'python -m pipeline try "The answer is [MASK]."'
    best = prompts[0]
    return f"python -m pipeline try {shlex.quote(best['prompt'])} ({best['answer']}: {best['probability']:.0%})"


def print_mlp(trained: dict[str, Any], evaluated: dict[str, Any], checkpoint: Path) -> None:
    """`trained`, `evaluated`: the counts of TrainMlp and EvaluateMlp."""
    log("The MLP is trained.")
    log(
        f"  {trained['steps']} steps with {trained['num_workers']} worker(s), loss {recorded(trained, 'first_loss')} → "
        f"{recorded(trained, 'loss', '.4f')} (mean of the last 50: {recorded(trained, 'mean_loss_last_50', '.4f')})"
    )
    log(
        f"  held out ({evaluated['images']} images): accuracy {evaluated['accuracy']:.2%}, loss {evaluated['loss']:.4f}"
    )
    log(f"  checkpoint: {checkpoint}")
