"""Gates on the decoder layers of vLLM's model: each runs its layer on the tokens that need it and passes on the rest.

One class serves vLLM's native layers, which return hidden states and a residual, and those of its Transformers
backend. Like the gate for transformers, this one replaces ``forward`` of the layer instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .steps import StepPlan, TokenSubset

#: Attribute of a decoder layer that holds its private copy.
PRIVATE = "skipdecode_private"

#: Makes a context within which attention sees only the tokens of a subset; it yields their indices, on the device.
SubsetAttention = Callable[[TokenSubset], AbstractContextManager[Tensor]]


class StepContext:
    """State that all gates of a model share: the current step's plan, attention to its subsets, and counters.

    Attributes:
        adds_residual: whether the input of a layer that takes a residual is the sum of hidden states and residual.
        layers: a CompiledLayers, which runs layers; None: they run as plain Python.
        group_size: how many layers of a uniform step run together, to be compiled together; 1: each alone.
        recorded: of each layer's outputs, (layer, norms of the hidden states); None: nothing is recorded.
        full_tokens, run_tokens: layer-tokens since the start, of the full model and those that ran. A layer-token is
            one token in one layer.
    """

    def __init__(self) -> None:
        self.plan: StepPlan | None = None
        self.attention: SubsetAttention | None = None
        self.adds_residual = True
        self.layers: Any = None
        self.group_size = 1
        self.gates: list[Gate] = []
        self.groups: dict[Hashable, LayerGroup] = {}
        self.passed: dict[str, Any] = {}  # arguments of a group's other layers: what its first layer got and gave
        self.recorded: list[tuple[int, list[float]]] | None = None
        self.reset_counters()

    @contextmanager
    def following(self, plan: StepPlan, attention: SubsetAttention | None) -> Iterator[None]:
        """Context within which gates follow a plan; elsewhere every layer runs for every token.

        RuntimeError: the step did not run as planned, as when a compiled graph bypasses the gates.
        """
        expected = self.run_tokens + sum(plan.counts)
        self.count(plan, has_run=plan.is_full)  # vLLM's graph of the model does not call the gates
        self.plan = plan
        self.attention = attention
        try:
            yield
        finally:
            self.plan = self.attention = None
            self.passed = {}
        if self.run_tokens != expected:
            raise RuntimeError(f"{self.run_tokens} layer-tokens ran, {expected} were planned: something bypasses gates")

    def count(self, plan: StepPlan, has_run: bool) -> None:
        """Count a step; ``has_run``: its layers run without their gates."""
        self.full_tokens += plan.tokens * len(plan.counts)
        if has_run:
            self.run_tokens += sum(plan.counts)

    def reset_counters(self) -> None:
        """Set the counters to 0."""
        self.full_tokens = self.run_tokens = 0

    def run(self, forward: Callable[..., Any], tokens: int, **kwargs: Any) -> Any:
        """Output of a layer, module or group for ``tokens`` tokens, compiled where that is possible."""
        if self.layers is None or torch.compiler.is_compiling():
            return forward(**kwargs)
        return self.layers.run(forward, kwargs, tokens)

    def group(self, first: int, plan: StepPlan) -> LayerGroup:
        """Group of layers that begins with ``first``, as a uniform step runs them."""
        span = slice(first, first + self.group_size - first % self.group_size)
        key = first, plan.runs[0, span].tobytes(), plan.acts[0, span].tobytes()
        if key not in self.groups:
            self.groups[key] = LayerGroup(self.gates[span], plan)
        return self.groups[key]


class Gate:
    """Replacement of one layer's ``forward``."""

    def __init__(self, layer: nn.Module, context: StepContext, index: int) -> None:
        self.original: Callable[..., Any] = layer.forward
        #: Copy of the layer that runs for tokens that skip other layers; None: the layer itself does.
        self.private: nn.Module | None = getattr(layer, PRIVATE, None)
        self.context = context
        self.index = index
        self.__signature__ = inspect.signature(self.original)
        self.names = list(self.__signature__.parameters)
        self.hidden = "hidden_states" if "hidden_states" in self.names else self.names[0]
        self.has_residual = "residual" in self.names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the tokens that need it; hidden states and residual of the others pass unchanged."""
        context = self.context
        plan = context.plan
        if plan is None:
            return self.original(*args, **kwargs)
        kwargs |= dict(zip(self.names, args, strict=False))
        if not plan.is_full:
            context.run_tokens += plan.counts[self.index]
        if plan.uniform and context.group_size > 1 and context.recorded is None:
            self._pass_group(plan, kwargs)
        else:
            for module, places in plan.adapter_modules(self.index):
                self.change(module, places, kwargs)
            for forward, subset in self.parts(plan):
                self._run(forward, subset, plan, kwargs)
        if context.recorded is not None:
            hidden, residual = kwargs[self.hidden], kwargs.get("residual") if context.adds_residual else None
            norms = (hidden if residual is None else hidden + residual).float().norm(dim=-1)
            context.recorded.append((self.index, norms.flatten().tolist()))
        return (kwargs[self.hidden], kwargs.get("residual")) if self.has_residual else kwargs[self.hidden]

    def parts(self, plan: StepPlan) -> list[tuple[Callable[..., Any], TokenSubset | None]]:
        """What runs in a step, the layer, its private copy or both, each with its tokens; None: all tokens."""
        found = plan.parts(self.index, self.private is not None)
        private = self.original if self.private is None else self.private.forward
        return [(private if is_private else self.original, subset) for is_private, subset in found]

    def _pass_group(self, plan: StepPlan, kwargs: dict[str, Any]) -> None:
        """Run the layer's group if the layer is its first. The group's other layers then only pass on its output.

        Raises UnlikeArguments if they were to get anything else than the first got and the group gave.
        """
        context = self.context
        if self.index % context.group_size == 0:
            group = context.group(self.index, plan)
            if group.parts:
                kwargs.update(self.named(context.run(group.forward, plan.tokens, **kwargs)))
            context.passed = kwargs
        elif kwargs.keys() != context.passed.keys() or any(kwargs[name] is not context.passed[name] for name in kwargs):
            raise UnlikeArguments(f"layer {self.index} has other arguments than those before it")

    def _run(self, forward: Callable[..., Any], subset: TokenSubset | None, plan: StepPlan, kwargs: Any) -> None:
        """Replace hidden states and residual in ``kwargs`` by a layer's output, for the tokens of a subset."""
        context = self.context
        if subset is None:
            kwargs.update(self.named(context.run(forward, plan.tokens, **kwargs)))
            return
        assert context.attention is not None
        with context.attention(subset) as tokens:
            output = context.run(forward, len(tokens), **select(kwargs, tokens, plan.tokens))
        for name, part in self.named(output).items():
            before = kwargs.get(name)
            if before is None and part is not None:
                # The first layer turns its input into the residual; a token that skips it has all its state in hidden.
                before = torch.zeros_like(kwargs[self.hidden])
            # None: a model family that adds the residual inside the layer.
            kwargs[name] = None if part is None else before.index_copy(before.ndim - 2, tokens, part)

    def named(self, output: Any) -> dict[str, Any]:
        """Hidden states and residual of a layer's output, by the names of the next layer's arguments."""
        if self.has_residual:
            return dict(zip((self.hidden, "residual"), output, strict=True))
        assert isinstance(output, Tensor), "a layer that returns more than hidden states"
        return {self.hidden: output}

    def change(self, module: nn.Module, places: Any, kwargs: dict[str, Any]) -> None:
        """Change hidden states by an adapter's module; a residual that is a part of them becomes 0."""
        hidden = kwargs[self.hidden]
        residual = kwargs.get("residual") if self.context.adds_residual else None
        whole = hidden if residual is None else hidden + residual
        axis = hidden.ndim - 2
        if places is None:
            kwargs[self.hidden] = self.context.run(module.forward, hidden.shape[axis], hidden=whole)
            if residual is not None:
                kwargs["residual"] = torch.zeros_like(residual)
            return
        tokens = torch.from_numpy(places).to(hidden.device)
        changed = self.context.run(module.forward, len(tokens), hidden=whole.index_select(axis, tokens))
        kwargs[self.hidden] = hidden.index_copy(axis, tokens, changed)
        if residual is not None:
            kwargs["residual"] = residual.index_fill(axis, tokens, 0)


class UnlikeArguments(RuntimeError):
    """Layers that run together would get other arguments each."""


class LayerGroup(nn.Module):
    """Successive layers as uniform steps run them, with an adapter's modules between them: one module to compile."""

    def __init__(self, gates: Sequence[Gate], plan: StepPlan) -> None:
        super().__init__()
        found = [
            (gate, [module for module, _ in plan.adapter_modules(gate.index)], [each for each, _ in gate.parts(plan)])
            for gate in gates
        ]
        self.parts = [(gate, modules, forwards) for gate, modules, forwards in found if modules or forwards]

    def forward(self, **kwargs: Any) -> Any:
        """Output of the last of the layers, for the arguments of the first."""
        for gate, modules, forwards in self.parts:
            for module in modules:
                gate.change(module, None, kwargs)
            for forward in forwards:
                kwargs.update(gate.named(gate.context.run(forward, kwargs[gate.hidden].shape[-2], **kwargs)))
        return (kwargs[gate.hidden], kwargs.get("residual")) if gate.has_residual else kwargs[gate.hidden]


def select(value: Any, tokens: Tensor, count: int) -> Any:
    """Tokens with these indices, of every tensor that has ``count`` tokens, also in tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)(select(item, tokens, count) for item in value)
    if isinstance(value, dict):
        return {name: select(item, tokens, count) for name, item in value.items()}
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    axis = token_axis(value)
    return value.index_select(axis, tokens) if value.shape[axis] == count else value


def token_axis(value: Tensor) -> int:
    """Axis that has an entry per token: the last of positions, the second to last of hidden states and rotations."""
    return value.ndim - 1 if value.ndim == 1 or not value.is_floating_point() else value.ndim - 2


def decoder_layers(model: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """Decoder layers of a model. Raises UnsupportedModel if it has not exactly one stack of ``num_layers`` layers."""
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers]
    inner = {id(part) for stack in stacks for part in stack.modules() if part is not stack}
    # Gemma 4 holds the same layers in several lists.
    distinct = {tuple(map(id, stack)): list(stack) for stack in stacks if id(stack) not in inner}
    if len(distinct) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} has {len(distinct)} stacks of {num_layers} decoder layers: skipping needs one"
        )
    return next(iter(distinct.values()))


def add_gates(model: nn.Module, num_layers: int) -> StepContext:
    """Put a gate on each decoder layer, and return the context that they share."""
    context = StepContext()
    for index, layer in enumerate(decoder_layers(model, num_layers)):
        layer.forward = Gate(layer, context, index)
        context.gates.append(layer.forward)
    return context


@torch.no_grad()
def adds_residual(layer: nn.Module, config: Any, device: torch.device) -> bool:
    """Whether a layer's input is the sum of its hidden states and residual, tried on random input.

    In most of vLLM's families it is. In others, as Cohere and EXAONE 4, layers ignore the residual.
    Raises UnsupportedModel if the layer, which has no gate yet, follows neither rule.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    if "residual" not in inspect.signature(layer.forward).parameters:
        return False
    shape = (3, 2, config.model_config.get_hidden_size())
    draws = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    hidden, first, second = draws.to(device, config.model_config.dtype)
    attentions: list[Any] = [part for part in layer.modules() if isinstance(part, AttentionLayerBase)]
    for attention in attentions:
        attention.forward = lambda query, *args, **kwargs: torch.zeros_like(query)

    def run(hidden: Tensor, residual: Tensor) -> tuple[Tensor, Any]:
        # Fused kernels write into their arguments.
        return layer(positions=torch.arange(2, device=device), hidden_states=hidden.clone(), residual=residual.clone())

    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=2):
        outputs = [run(hidden, first), run(hidden, second), run(hidden + first, torch.zeros_like(first))]
    for attention in attentions:
        del attention.forward
    if outputs[0][1] is None or torch.equal(outputs[0][0], outputs[1][0]):
        return False
    apart, _, joined = [(hidden + residual).float() for hidden, residual in outputs]
    if (apart - joined).norm() <= 0.05 * joined.norm():  # equal, in any dtype
        return True
    raise UnsupportedModel(f"no adapters for {type(layer).__name__} in vLLM: its residual follows no known rule")
