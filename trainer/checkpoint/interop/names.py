"""Parameter names of other tools, tied parameters, and the numbering of parameters in torch optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from common.errors import CheckpointError
from trainer.models.bert import has_weight_decay
from trainer.models.config import ModelConfig

#: Alias of a tied parameter → its name in `BertForPreTraining.named_parameters`.
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
#: Buffers, not parameters, in files saved by Hugging Face before 4.31.
_BUFFERS = ("bert.embeddings.position_ids",)
#: AdamW's and LAMB's moments of each parameter, and Muon's of a matrix.
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"


def our_name(name: str) -> str:
    """The parameter's name in current Hugging Face models.

    Data-parallel wrappers add `module.`; `dense_act` is NVIDIA's, `gamma` and `beta` are TensorFlow's.
    """
    name = name.removeprefix("module.").replace("dense_act", "dense")
    return name.removesuffix(".gamma") + ".weight" if name.endswith(".gamma") else _without_beta(name)


def _without_beta(name: str) -> str:
    return name.removesuffix(".beta") + ".bias" if name.endswith(".beta") else name


def by_our_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Our name → the file's name, in file order, without buffers. Raises `CheckpointError` for a duplicate."""
    found: dict[str, str] = {}
    for name in names:
        ours = our_name(name)
        if ours in found:
            raise CheckpointError(f"{where} holds {ours} twice: as {found[ours]} and as {name}; it cannot be both")
        if ours not in _BUFFERS:
            found[ours] = name
    return found


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model, in the order of `named_parameters`, which is also Hugging Face's.

    Listed explicitly, because building the model, even on the meta device, takes longer than reading the checkpoint.
    """
    hidden, intermediate = model.hidden_size, model.intermediate_size

    def dense(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.LayerNorm.weight": (hidden,), f"{name}.LayerNorm.bias": (hidden,)}

    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (model.vocab_size, hidden),
        "bert.embeddings.position_embeddings.weight": (model.max_position_embeddings, hidden),
        "bert.embeddings.token_type_embeddings.weight": (model.type_vocab_size, hidden),
        **norm("bert.embeddings"),
    }
    for layer in (f"bert.encoder.layer.{number}" for number in range(model.num_hidden_layers)):
        for part in ("query", "key", "value"):
            shapes |= dense(f"{layer}.attention.self.{part}", hidden, hidden)
        shapes |= dense(f"{layer}.attention.output.dense", hidden, hidden) | norm(f"{layer}.attention.output")
        shapes |= dense(f"{layer}.intermediate.dense", intermediate, hidden)
        shapes |= dense(f"{layer}.output.dense", hidden, intermediate) | norm(f"{layer}.output")
    if model.next_sentence:
        shapes |= dense("bert.pooler.dense", hidden, hidden)
    shapes |= {"cls.predictions.bias": (model.vocab_size,)}
    shapes |= dense("cls.predictions.transform.dense", hidden, hidden) | norm("cls.predictions.transform")
    return shapes | (dense("cls.seq_relationship", 2, hidden) if model.next_sentence else {})


def moment_names(parameters: Iterable[str], found: Collection[str] = ()) -> list[str]:
    """`exp_avg.<name>` … of an optimizer with the tensors `found`, in the trainer's order: parameters with weight decay
    first. A parameter that Muon updates has one moment, others have those of AdamW."""
    ordered = sorted(parameters, key=lambda name: not has_weight_decay(name))
    by_muon = [name for name in ordered if f"{MOMENTUM}.{name}" in found]
    others = [name for name in ordered if name not in set(by_muon)]
    return [
        *(f"{moment}.{name}" for moment in MOMENTS for name in others),
        *(f"{MOMENTUM}.{name}" for name in by_muon),
    ]


#: Substrings of the names without weight decay, which form the second parameter group, in different scripts: the
#: tutorial's; neuronx-distributed's example, whose list also has "norm", which matches no name; a single group.
_WITHOUT_DECAY: tuple[tuple[str, ...], ...] = (("bias", "LayerNorm"), ("bias",), ())


def numbered_parameters(
    optimizer: Mapping[str, Any], parameters: Mapping[str, tuple[int, ...]], where: str
) -> dict[int, str]:
    """Number → parameter in a torch optimizer's state_dict, which numbers them by group, then in model order.

    `parameters`: names in model order, with their shapes in this file. The grouping is inferred from the groups'
    lengths and the moments' shapes. Raises `CheckpointError` if no known grouping fits.
    """
    groups = [list(group["params"]) for group in optimizer["param_groups"]]
    numbers = [number for group in groups for number in group]
    wrong = f"{len(numbers)} numbered parameters in groups of {', '.join(str(len(group)) for group in groups)}"
    for without in _WITHOUT_DECAY:
        decayed = [name for name in parameters if not any(word in name for word in without)]
        rest = [name for name in parameters if name not in set(decayed)]
        if [len(group) for group in groups] != [len(part) for part in (decayed, rest) if part]:
            continue
        named = dict(zip(numbers, [*decayed, *rest], strict=True))
        unlike = [
            name
            for number, name in named.items()
            for moment in MOMENTS
            if moment in optimizer["state"].get(number, {})
            and tuple(_shape(optimizer["state"][number][moment]) or parameters[name]) != parameters[name]
        ]
        if not unlike:
            return named
        wrong = f"moments shaped differently from {unlike[0]}"
    raise CheckpointError(
        f"{where}: cannot tell which parameter each of the optimizer's numbers means: it has {wrong}, the model "
        f"has {len(parameters)} parameters; leave the optimizer out with --no-optimizer"
    )


def _shape(tensor: Any) -> tuple[int, ...] | None:
    """The shape of a tensor; None for a tensor reference."""
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None
