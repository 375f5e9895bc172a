"""Kernels in C for CPUs: what lies between BERT's matrix products.

A CPU with bf16 instructions multiplies so fast that torch's own operations between the products, one pass over memory
each and dropout by one core, take half of a step.
"""

from trainer.devices.cpu_kernels.attention import Sequences, attention
from trainer.devices.cpu_kernels.build import forbid, kind, library
from trainer.devices.cpu_kernels.operators import bias_dropout_add_norm, bias_gelu, cross_entropy, dropout
from trainer.devices.cpu_kernels.weights import add_gradient, embedding

__all__ = [
    "Sequences",
    "add_gradient",
    "attention",
    "bias_dropout_add_norm",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "embedding",
    "forbid",
    "kind",
    "library",
]
