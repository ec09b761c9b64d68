"""Compiles decoder layers one by one, for steps that skip: vLLM's graph of the whole model runs all of them.

Like vLLM's graph, a compiled layer has no guards. So it runs only where its arguments look as when it was compiled,
but for the number of tokens; elsewhere the layer runs as plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

from .gate import token_axis


class Unknown(Exception):
    """An argument of which nothing is known but its type."""


class CompiledLayers:
    """The compiled layers of a model, by layer and by what its arguments look like.

    Args:
        options: of the compiler, Inductor.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {**options, "freezing": False}  # which takes weights for constants
        #: By layer, and by what :func:`look_of` its arguments says.
        self.made: dict[tuple[Any, Hashable], Callable[..., Any]] = {}
        #: By their code and what their inputs look like.
        self.graphs: dict[Hashable, Any] = {}
        self._compiles = False

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Return a context within which layers are compiled for the arguments that they get."""
        self._compiles = True
        try:
            yield
        finally:
            self._compiles = False

    def run(self, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: int) -> Any:
        """Return what ``forward``, a layer's bound method, returns for ``tokens`` tokens; compiled where it can be."""
        try:
            key = forward, look_of((args, kwargs), tokens)
        except Unknown:
            return forward(*args, **kwargs)
        made = self.made.get(key)
        if made is None and self._compiles:
            made = self.made[key] = self._compile(forward, args, kwargs, tokens)
        return forward(*args, **kwargs) if made is None else made(forward.__self__, *args, **kwargs)

    def _compile(self, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: int) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.ndim and value.shape[axis := token_axis(value)] == tokens:
                torch._dynamo.mark_dynamic(value, axis)
        traced: Any = torch.compile(
            forward,
            fullgraph=True,
            dynamic=False,
            backend=self._graph,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
        )
        return traced.aot_compile((args, dict(kwargs))).fn

    def _graph(self, graph: GraphModule, inputs: list[Any], **_: Any) -> Any:
        """Compile a layer's graph, once for all layers that have the same: names and weights are among its inputs."""
        if any(node.op == "get_attr" for node in graph.graph.nodes):
            return compile_fx(graph, inputs, config_patches=self._options)
        key = graph.code, *map(_input_look, inputs)
        if key not in self.graphs:
            self.graphs[key] = compile_fx(graph, inputs, config_patches=self._options)
        return self.graphs[key]


def _input_look(value: Any) -> tuple[Any, ...]:
    """Return what a graph takes for granted about an input, whose number of tokens is a symbol."""
    if not isinstance(value, Tensor):
        return (type(value),)
    return value.dtype, value.device, str(value.shape), str(value.stride())


def look_of(value: Any, tokens: int) -> Hashable:
    """Return all that a compiled layer takes for granted about its arguments. Raises Unknown if that is not enough.

    Args:
        value: an argument, or tuples, lists and dicts of them.
        tokens: how many tokens there are; an axis of as many entries is one of tokens.
    """
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if shape and shape[axis := token_axis(value)] == tokens:
            shape[axis] = -1
        strides = (stride for stride, size in zip(value.stride(), shape, strict=True) if size != 1)
        return (value.dtype, value.device, *shape, *strides)
    if isinstance(value, Mapping):
        return tuple((name, look_of(item, tokens)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return (type(value), *(look_of(item, tokens) for item in value))
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    raise Unknown(type(value).__name__)


def is_compiled(model: nn.Module) -> bool:
    """Return whether vLLM compiles the model's decoder."""
    wrappers = [part for part in model.modules() if isinstance(part, TorchCompileWithNoGuardsWrapper)]
    return any(not getattr(part, "do_not_compile", True) for part in wrappers)
