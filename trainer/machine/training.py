"""Checks of whole steps: gradients against Hugging Face's model, updates against fp64, and that a resumed run ends with
the same bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import Interrupted
from common.process import available_cores, stop_early_on_signals
from trainer.checkpoint.directory import checkpoint_path
from trainer.checkpoint.resume_point import checkpoint_directory
from trainer.data.bert_batch import IGNORED
from trainer.data.shards import ShardSet
from trainer.devices.base import Device
from trainer.devices.cpu import CpuDevice
from trainer.machine.subject import Finding, Subject, fetch, trained_steps, trainer_of
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.models.operations import Operations
from trainer.optim.parameters import Parameters
from trainer.optim.select import Optimizer
from trainer.parallel.mesh import Mesh
from trainer.parallel.shares import put_share
from trainer.parallel.tensor import TensorParallel
from trainer.precision import Precision
from trainer.rollback import train
from trainer.run import Run

#: Largest error of a parameter's gradient, relative to its norm. The worst seen: docs/decisions.md.
_GRADIENT_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
#: The same for a step's change of a parameter. Adam's quotient magnifies the error of gradients near 0.
_UPDATE_LIMIT = 0.02
#: For Muon: five Newton-Schulz steps in bf16 magnify its rounding (2⁻⁹) about 3.4 times each for small singular
#: values; the reference is in fp64. The worst seen is 0.16; a lost update has 1.
_MUON_LIMIT = 0.4
#: A tensor whose norm is less than a share of the average (a key's bias, whose gradient is 0 except for rounding) is
#: measured against that share: for gradients in fp32, and for all else.
_NEGLIGIBLE_FP32, _NEGLIGIBLE = 0.01, 0.05
_STEPS = 5


def check_gradients(subject: Subject) -> Iterator[Finding]:
    """The gradients of one step, summed over micro-steps and workers, against Hugging Face's model on the CPU."""
    model = subject.model.without_dropout()
    # Sums over the workers are the same in all; ranks that share a model have one part each.
    compares = subject.mesh.data_parallel_rank == 0
    for precision in dict.fromkeys(["fp32", subject.config.precision]):
        # On the host while the others wait, which may take longer than the timeout of their collectives.
        reference = functools.partial(hugging_face_gradients, subject, Precision(precision).weights)
        expected = subject.mesh.patiently(reference if compares else dict[str, Tensor])
        for way, device in subject.devices.items():
            # Not with shard_optimizer, where each worker has some of the gradients.
            run = subject.run(
                device, model, precision=precision, optimizer="AdamW", max_grad_norm=0.0, shard_optimizer=False
            )
            trainer = trainer_of(run)
            ranks = trainer.tensor_parallel
            trainer.optimizer = captured = _Captured(device, trainer.parameters)
            list(trained_steps(run, trainer, 1))
            del trainer
            computed_in, floor = torch.bfloat16, _NEGLIGIBLE
            if precision in ("fp32", "fp64"):
                computed_in, floor = torch.float32, _NEGLIGIBLE_FP32
            if compares:
                wanted = _shares(captured.gradients, expected, ranks)
                for name, error in _errors(captured.gradients, wanted, floor):
                    yield Finding(f"{way}, {precision}, {name}", error, _GRADIENT_LIMITS[computed_in])


class _Captured(Optimizer):
    """Stands in for an optimizer: keeps the gradients of the step and changes nothing."""

    def __init__(self, device: Device, parameters: Parameters) -> None:
        self._device, self._parameters = device, parameters
        self.gradients: dict[str, Tensor] = {}

    def step(self, learning_rate: float) -> None:
        views = dict(self._parameters.named([group.gradients for group in self._parameters.groups]))
        self.gradients = dict(zip(views, fetch(self._device, *views.values()), strict=True))


def hugging_face_gradients(subject: Subject, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients, in fp32, of the mean losses over the sample; the initial weights are rounded to `dtype`."""
    import transformers

    config = subject.model.without_dropout().to_hugging_face()
    theirs = getattr(transformers, config["architectures"][0])(transformers.BertConfig(**config))
    initial = BertForPreTraining(subject.model)
    initial.initialise(subject.config.seed)
    ours = dict(initial.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours[name].to(dtype))
    theirs.tie_weights()
    shards = ShardSet.open(subject.data)
    rows = shards.read(0, np.arange(int(shards.rows_per_shard[0])))
    arrays = {name: torch.from_numpy(value.astype(np.int64)) for name, value in rows.items()}
    positions = arrays["masked_lm_positions"]
    labels = torch.full(arrays["input_ids"].shape, IGNORED)
    row, column = (positions > 0).nonzero(as_tuple=True)
    labels[row, positions[row, column]] = arrays["masked_lm_ids"][row, column]
    with _all_threads():
        for some in torch.arange(len(labels)).split(8):
            out = theirs(
                input_ids=arrays["input_ids"][some],
                attention_mask=arrays["input_mask"][some],
                token_type_ids=arrays["segment_ids"][some],
            )
            words = out.prediction_logits if subject.model.next_sentence else out.logits
            loss = _cross_entropy(words, labels[some]) / len(row)
            if subject.model.next_sentence:
                pairs = arrays["next_sentence_labels"]
                loss = loss + _cross_entropy(out.seq_relationship_logits, pairs[some]) / len(pairs)
            loss.backward()
    return {name: parameter.grad for name, parameter in theirs.named_parameters()}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@contextlib.contextmanager
def _all_threads() -> Iterator[None]:
    """All cores for the CPU's part; torchrun leaves it only one."""
    before = torch.get_num_threads()
    torch.set_num_threads(available_cores())
    yield
    torch.set_num_threads(before)


def check_updates(subject: Subject) -> Iterator[Finding]:
    """Five steps of a small model in fp32: each changes every weight as it does on the CPU in fp64."""
    model = _small(subject.model).without_dropout()
    steps: dict[str, Any] = {"max_steps": _STEPS, "stop_step": _STEPS, "warmup_steps": 2}
    if subject.config.optimizer == "SGD":
        steps["lr"] = 0.1  # with a small rate its steps are as small as the rounding of fp32 weights
    # One worker that does the micro-steps of all.
    usteps = subject.config.grad_accum_usteps * subject.mesh.data_parallel_size
    exact = subject.run(
        _Exact(), model, mesh=Mesh(), precision="fp64", tensor_parallel_size=1, grad_accum_usteps=usteps, **steps
    )
    whole = list(_movements(exact))
    ranks = TensorParallel(subject.mesh.tensor_parallel_rank, subject.mesh.tensor_parallel_size)
    limit = _MUON_LIMIT if subject.config.optimizer == "Muon" else _UPDATE_LIMIT
    for way, device in subject.devices.items():
        run = subject.run(device, model, precision="fp32", **steps)
        for step, (found, expected) in enumerate(zip(_movements(run), whole, strict=True), 1):
            for name, error in _errors(found, _shares(found, expected, ranks), _NEGLIGIBLE):
                yield Finding(f"{way}, step {step}, {name}", error, limit)


def _movements(run: Run) -> Iterator[dict[str, Tensor]]:
    """What each step adds to the weights, in fp64."""
    trainer = trainer_of(run)
    named = dict(trainer.model.named_parameters())
    before = [copy.double() for copy in fetch(run.device, *named.values())]
    for _ in trained_steps(run, trainer, _STEPS):
        after = [copy.double() for copy in fetch(run.device, *named.values())]
        yield {name: new - old for name, old, new in zip(named, before, after, strict=True)}
        before = after


class _Exact(CpuDevice):
    """The CPU with torch's own operations."""

    operations = Operations()


def _small(model: ModelConfig) -> ModelConfig:
    """The same kind of model, two layers of 64."""
    return dataclasses.replace(model, num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128)


def check_resume(subject: Subject) -> Iterator[Finding]:
    """Five steps with dropout, and three and then two after a restart, end with the same bytes."""
    for way, device in subject.devices.items():
        if not device.resumes_exactly(subject.config.precision):
            yield Finding(f"{subject.config.precision} is rounded here with a state that cannot be saved")
            continue
        ends = []
        for name, stops in (("straight", [_STEPS]), ("resumed", [3, _STEPS])):
            folder = subject.config.output_dir / f"{way}-{name}"
            for stop in stops:
                run = subject.run(
                    device, _small(subject.model), output_dir=folder, trial=False, max_steps=_STEPS, stop_step=stop,
                    resume=stop != stops[0], warmup_steps=2, ckpt_interval_steps=0,
                )  # fmt: skip
                if not train(run):
                    raise Interrupted("the self-test was not completed")
                stop_early_on_signals()  # training has set handlers of its own
            ends.append(checkpoint_path(checkpoint_directory(run.config), _STEPS))
        subject.mesh.barrier()
        if subject.mesh.is_root:
            yield Finding(f"{way}, files of the last checkpoint that differ", float(_differing_files(*ends)))


def _differing_files(a: Path, b: Path) -> int:
    contents = [{path.name: path.read_bytes() for path in folder.glob("*.safetensors")} for folder in (a, b)]
    names = contents[0].keys() | contents[1].keys()
    return sum(contents[0].get(name) != contents[1].get(name) for name in names) if names else 1


def _shares(like: Mapping[str, Tensor], whole: Mapping[str, Tensor], ranks: TensorParallel) -> dict[str, Tensor]:
    """This rank's parts of whole tensors, in the shapes of `like`, in fp64. Raises `KeyError` if that lacks one."""
    shares = {name: torch.empty(like[name].shape, dtype=torch.float64) for name in whole}
    for name, target in shares.items():
        put_share(target, name, whole[name].double(), ranks)
    return shares


def _errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], negligible: float
) -> Iterator[tuple[str, float]]:
    """For each tensor the norm of its error, relative to the expected norm or a share `negligible` of the average."""
    norms = {name: torch.linalg.vector_norm(tensor).item() for name, tensor in expected.items()}
    floor = negligible * math.sqrt(sum(norm**2 for norm in norms.values()) / len(norms))
    for name, tensor in expected.items():
        error = torch.linalg.vector_norm(found[name].double() - tensor).item()
        yield name, error / max(norms[name], floor, 1e-30)
