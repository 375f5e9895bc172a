"""A made-up finished run as it is on disk, for testing the views of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from stages.directory.attempts import ATTEMPTS
from stages.directory.manifest import IDENTITY, Identity, Output, StartTime, claim, finish

#: When it began, in seconds since 1970.
BEGAN = 1_795_000_000.0
VALUES = ("loss", "masked_lm_loss", "next_sentence_loss", "learning_rate", "grad_norm", "throughput")
EVALUATION = {
    "samples": 2000, "masked_tokens": 30417, "masked_lm_loss": 1.93, "next_sentence_loss": 0.21,
    "masked_lm_accuracy": 0.6134, "next_sentence_accuracy": 0.935,
    "unigram_loss": 7.24, "unigram_accuracy": 0.0587, "unigram_tokens": 2_000_000, "unigram_from_training": True,
    "masked_tokens_frequent": 15000, "masked_tokens_common": 9000, "masked_tokens_rare": 6417,
    "masked_lm_accuracy_frequent": 0.7312, "masked_lm_accuracy_common": 0.5821, "masked_lm_accuracy_rare": 0.3817,
    "bits_per_character": 0.6275,
    "blimp_pairs": 2000, "blimp_accuracy": 0.6915,
    "blimp_accuracy_by_set": {"causative": 0.541, "drop_argument": 0.842},
}  # fmt: skip


def write_metrics(path: Path, first: int, steps: int, *, seed: int = 0, mode: str = "w") -> None:
    """The records of `steps` steps, from step `first`, as the trainer writes them."""
    rng = np.random.default_rng(seed)
    with path.open(mode) as file:
        for index in range(steps):
            words = 2 + 8 * math.exp(-5 * index / steps) + rng.normal(0, 0.05)
            pair = 0.7 * math.exp(-index / steps) + rng.normal(0, 0.02)
            record = {
                "step": first + index, "epoch": 0, "samples": 0, "loss": words + pair, "masked_lm_loss": words,
                "next_sentence_loss": pair, "learning_rate": 4e-4 * (1 - index / steps), "grad_norm": rng.gamma(4, 0.3),
                "throughput": rng.normal(900, 30), "step_time_s": 5.0, "time": BEGAN + 5.0 * (first + index),
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def write_stage(
    work: Path,
    stage: str,
    phase: int | None = None,
    *,
    counts: dict[str, Any],
    parameters: dict[str, Any],
    upstream: Mapping[str, Path] = MappingProxyType({}),
    **files: bytes,
) -> Path:
    """A complete stage. `upstream`: directories of the stages that it is made from."""
    made_from = {role: json.loads((path / IDENTITY).read_text())["fingerprint"] for role, path in upstream.items()}
    identity = Identity(stage, 1, phase, parameters=parameters, upstream=made_from)
    name = stage + ("" if phase is None else f"-phase{phase}")
    directory = work / f"{name}-{identity.fingerprint[:10]}"
    directory.mkdir(parents=True)
    claim(directory, identity)
    for file, content in files.items():
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_bytes(content)
    outputs = [Output.of(directory, directory / file) for file in files]
    finish(directory, identity, outputs, counts, start=StartTime("2026-11-18T00:00:00Z", time.monotonic()))
    return directory


def write_attempts(directory: Path, *spans: tuple[float, float | None, str]) -> None:
    """A span is (start, end, how), in seconds after `BEGAN`; an attempt without an end was killed."""
    lines = []
    for start, end, how in spans:
        lines.append({"started": BEGAN + start, "host": "node-1", "pid": 1, "seen": BEGAN + start - 60})
        if end is not None:
            lines.append(
                {"ended": BEGAN + end, "how": how, "status": 0, "error": "CUDA <error>" if how == "failed" else ""}
            )
    (directory / ATTEMPTS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(work: Path, steps: tuple[int, int]) -> list[Path]:
    """The directories of a run that was interrupted, killed and failed on the way, in running order."""
    first, second = (
        write_stage(
            work, "pretrain", phase, counts={"num_workers": 32, "precision": "autocast", "steps": steps[phase - 1]},
            parameters={"seq_len": 128 if phase == 1 else 512, "max_steps": steps[phase - 1], "lr": 4e-4},
            weights=bytes(1000),
        )
        for phase in (1, 2)
    )  # fmt: skip
    write_metrics(first / "metrics.jsonl", 1, steps[0])
    write_metrics(second / "metrics.jsonl", steps[0] + 1, steps[1], seed=1)
    middle, end = 2.5 * steps[0], 5.0 * steps[0]
    write_attempts(first, (5, middle / 2, "interrupted"), (middle / 2 + 60, None, ""), (middle, end, "complete"))
    write_attempts(second, (end, end + 600, "failed"), (end + 90_000, end + 90_000 + 5 * steps[1], "complete"))
    text = {"source": "https://somebody:hunter2@example.org/wiki.xml.bz2?X-Amz-Signature=abc"}
    tokens = write_stage(
        work,
        "tokenize_corpus",
        counts={"documents": 10, "tokens": 99, "vocab_size": 30522},
        parameters=text,
        tokens=b"1",
    )
    merged = write_stage(
        work, "merge_shards", counts={"parameters": 336_226_108}, parameters={}, **{"model/config.json": b"{}"}
    )
    evaluated = write_stage(work, "evaluate", counts=EVALUATION, parameters={"max_samples": 2000}, file=b"1")
    return [tokens, first, second, merged, evaluated]
