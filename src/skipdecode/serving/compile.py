"""Compiled layers for steps that skip: vLLM's compiled graph of the whole model runs all layers.

Decoder layers are compiled one by one. Like vLLM's graph, a compiled layer has no guards. So it runs only where its
arguments look as when it was compiled, but for the number of tokens; elsewhere the layer runs as plain Python.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from .gate import token_axis


class CompiledLayers:
    """Compiled layers of a model, by layer and by the signature of its arguments; ``options`` are Inductor's."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {**options, "freezing": False}  # which takes weights for constants
        self.compiled: dict[tuple[Any, Hashable], Callable[..., Any]] = {}
        self.graphs: dict[Hashable, Any] = {}  # by code and look of the inputs
        self.compiles = False  # whether layers are compiled for the arguments that they get

    def run(self, forward: Any, kwargs: Mapping[str, Any], tokens: int) -> Any:
        """Output of ``forward``, a module's bound method, for ``tokens`` tokens."""
        try:
            key = forward, signature_of(kwargs, tokens)
        except TypeError:
            return forward(**kwargs)
        if self.compiles and key not in self.compiled:
            self.compiled[key] = self._compile(forward, kwargs, tokens)
        compiled = self.compiled.get(key)
        return forward(**kwargs) if compiled is None else compiled(forward.__self__, **kwargs)

    def _compile(self, forward: Any, kwargs: Mapping[str, Any], tokens: int) -> Any:
        for value in tree_leaves(kwargs):
            if isinstance(value, Tensor) and value.ndim and value.shape[axis := token_axis(value)] == tokens:
                torch._dynamo.mark_dynamic(value, axis)
        options: Any = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        traced: Any = torch.compile(forward, fullgraph=True, dynamic=False, backend=self._graph, options=options)
        return traced.aot_compile(((), dict(kwargs))).fn

    def _graph(self, graph: GraphModule, inputs: list[Any], **_: Any) -> Any:
        """Compile a layer's graph once for all layers that have the same: weights are among its inputs."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        key = graph.code, *((value.dtype, value.device, str(value.shape), str(value.stride())) for value in tensors)
        has_constants = any(node.op == "get_attr" for node in graph.graph.nodes)
        if has_constants or key not in self.graphs:
            self.graphs[key] = compile_fx(graph, inputs, config_patches=self._options)
        return self.graphs[key]


def signature_of(value: Any, tokens: int) -> Hashable:
    """All that a compiled layer takes for granted about arguments for a number of tokens. TypeError: one is unknown."""
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if shape and shape[axis := token_axis(value)] == tokens:
            shape[axis] = -1
        strides = (stride for stride, size in zip(value.stride(), shape, strict=True) if size != 1)
        return (value.dtype, value.device, *shape, *strides)
    if isinstance(value, Mapping):
        return tuple((name, signature_of(item, tokens)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return (type(value), *(signature_of(item, tokens) for item in value))
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    raise TypeError(type(value).__name__)
