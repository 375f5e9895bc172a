"""torch.compile, for devices that otherwise run eagerly."""

from __future__ import annotations

import abc
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn


class Compiler(abc.ABC):
    """Compiles a model's forward and backward pass for static shapes, and lists the graphs."""

    #: Whether a part of the model that torch cannot trace is an error; otherwise it runs eagerly.
    whole_graph = False

    def __init__(self) -> None:
        #: hash, operations and seconds of each graph, in the order they were compiled. The seconds do not include the
        #: backward pass, which is compiled at its first use.
        self.graphs: list[dict[str, Any]] = []

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """`model`'s forward pass, compiled at its first call."""
        # Dynamo counts compilations by code, whichever model they were for, and runs eagerly after the eighth.
        torch._dynamo.reset()
        return torch.compile(model, backend=self._backend, dynamic=False, fullgraph=self.whole_graph)

    def _backend(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        began = time.monotonic()
        kernel = self.lower(graph, inputs)
        shapes = [(tuple(t.shape), str(t.dtype)) if isinstance(t, torch.Tensor) else repr(t) for t in inputs]
        self.graphs.append(
            {
                "hash": hashlib.sha256(f"{graph.code}{shapes}".encode()).hexdigest()[:32],
                "operations": len(graph.graph.nodes),
                "seconds": round(time.monotonic() - began, 3),
            }
        )
        return kernel

    @abc.abstractmethod
    def lower(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile one graph; `inputs` have the shapes that it is called with."""
