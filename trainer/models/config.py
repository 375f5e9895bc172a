"""The sizes of a BERT, as a validated frozen dataclass. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Self

from common.errors import UserError

#: Published sizes; debug: `--debug` of the Neuron tutorial's script.
#: tiny … medium: Turc et al. 2019 (arXiv:1908.08962), table 1; base and large: Devlin et al. 2018 (arXiv:1810.04805).
_PRESET_FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
PRESETS: dict[str, tuple[int, int, int, int]] = {
    "debug": (1, 16, 2, 64),
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "medium": (8, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
}
#: Values in a config.json that our model computes; others are refused.
_COMPUTES = {
    "model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "tie_word_embeddings": True,
    "is_decoder": False, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a BERT, in Hugging Face's names; the defaults are those of `bert-large-uncased`.

    Without `next_sentence` it is a BertForMaskedLM. (In a config.json, `architectures` does not tell: in those of
    Google's checkpoints, which have the next-sentence head, it is BertForMaskedLM.)
    """

    vocab_size: int = 30522
    num_hidden_layers: int = 24
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    next_sentence: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _require_kind(field.name, getattr(self, field.name), type(field.default))
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads} is not a whole "
                f"number; choose a hidden size that its heads divide"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The published model `name` with single fields changed. Raises `UserError` for an unknown name."""
        if name not in PRESETS:
            raise UserError(f"model '{name}' is not known; allowed: {', '.join(PRESETS)}")
        return cls(**{**dict(zip(_PRESET_FIELDS, PRESETS[name], strict=True)), **changes})

    @classmethod
    def of_hugging_face(cls, config: dict[str, Any]) -> Self:
        """From the object in a Hugging Face `config.json`; unused keys are ignored. Raises `UserError` for a value that
        is not allowed, and for another model."""
        for key, value in _COMPUTES.items():
            if config.get(key, value) != value:
                raise UserError(f"{key} is {config[key]}; only a BERT with {key} = {value} can be read or trained")
        return cls(**{f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config})

    def to_hugging_face(self) -> dict[str, Any]:
        """The object of a `config.json` that `from_pretrained` of the class in `architectures` reads."""
        return {
            "architectures": ["BertForPreTraining" if self.next_sentence else "BertForMaskedLM"],
            "model_type": "bert",
            "hidden_act": "gelu",
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
            **{name: value for name, value in self.to_dict().items() if name != "next_sentence"},
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as checkpoints and identities record them: `next_sentence` only where it is off."""
        return {name: value for name, value in vars(self).items() if name != "next_sentence" or not value}

    def without_dropout(self) -> Self:
        return dataclasses.replace(self, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    def require_divisible(self, tensor_parallel_size: int) -> None:
        """Raise `UserError` unless the model can be split among that many ranks."""
        for name in ("num_attention_heads", "intermediate_size"):
            value, size = getattr(self, name), tensor_parallel_size
            if value % size:
                raise UserError(
                    f"tensor_parallel_size = {size} does not divide {name} = {value}: {value} / {size} = "
                    f"{value / size:g}; choose a size that does"
                )


def _require_kind(name: str, value: Any, kind: type) -> None:
    """Raise `UserError` unless the value of a field is of its `kind` and in its range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        allowed, fits = "true or false", isinstance(value, bool)
    elif kind is int:
        allowed, fits = "a whole number 1 or more", is_number and isinstance(value, int) and value >= 1
    elif name.endswith("_prob"):
        allowed, fits = "0 ≤ p < 1", is_number and 0 <= value < 1
    else:
        allowed, fits = "a number 0 or more", is_number and 0 <= value < math.inf
    if not fits:
        raise UserError(f"{name} is {json.dumps(value, default=str)}; allowed: {allowed}")
