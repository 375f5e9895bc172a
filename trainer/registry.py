"""The devices and optimizers that a name can stand for. Imports no torch: the pipeline's settings read the names.

To add one, write its file and add its line here (CONTRIBUTING.md).
"""

from __future__ import annotations

import importlib
from typing import Any

#: Subclasses of `trainer.devices.base.Device`.
DEVICES = {
    "cpu": "trainer.devices.cpu:CpuDevice",
    "cuda": "trainer.devices.cuda:CudaDevice",
    "xla": "trainer.devices.xla:XlaDevice",
    "neuron": "trainer.devices.neuron:NeuronDevice",
}
#: Implementations of `trainer.optim.select.Optimizer`. Two of them are the tutorials' names, which say a precision too.
OPTIMIZERS = {
    "AdamW": "trainer.optim.adamw:AdamW",
    "AdamW_FP32OptimParams": "trainer.optim.adamw:AdamW",
    "AdamW_FP32ParamsCopy": "trainer.optim.adamw:AdamW",
    "LAMB": "trainer.optim.lamb:Lamb",
    "Muon": "trainer.optim.muon:Muon",
    "SGD": "trainer.optim.sgd:SGD",
}


def load(reference: str) -> Any:
    """The class that `module:name` names; its module, and torch with it, is imported only now."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
