"""Triton kernels for NVIDIA GPUs, as operators of torch.

A GPU reads and writes 3 to 5 TB/s and multiplies 700 TFLOP/s, so that torch's own operations between BERT's products,
one pass over memory each and some of them in fp32, take longer than the products. These read and write numbers of the
products' type and compute in fp32; gradients of weights and biases are summed in fp32, in a fixed order.
"""

from trainer.devices.kernels.attention import HEAD_SIZE_MAX, attention, takes_heads
from trainer.devices.kernels.cross_entropy import cross_entropy
from trainer.devices.kernels.gelu import bias_gelu
from trainer.devices.kernels.norm import bias_dropout_add_norm

__all__ = ["HEAD_SIZE_MAX", "attention", "bias_dropout_add_norm", "bias_gelu", "cross_entropy", "takes_heads"]
