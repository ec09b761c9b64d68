"""Gates on the decoder layers of vLLM's model: each runs its layer on the tokens that need it and passes on the rest.

One class serves vLLM's native layers, which return hidden states and a residual, and those of its Transformers
backend. Like the gate for transformers, this one replaces ``forward`` of the layer instance.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
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
        recorded: of each layer's outputs, (layer, norms of the hidden states); None: nothing is recorded.
        full_tokens, run_tokens: layer-tokens since the start, of the full model and those that ran. A layer-token is
            one token in one layer.
    """

    def __init__(self) -> None:
        self.plan: StepPlan | None = None
        self.attention: SubsetAttention | None = None
        self.adds_residual = True
        self.layers: Any = None
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
        """Output of a layer or module for ``tokens`` tokens, compiled where that is possible."""
        return forward(**kwargs) if self.layers is None else self.layers.run(forward, kwargs, tokens)


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
        for module, places in plan.adapter_modules(self.index):
            self._change(module, places, kwargs)
        if not plan.is_full:
            context.run_tokens += plan.counts[self.index]
        for private, subset in plan.parts(self.index, self.private is not None):
            forward = self.private.forward if private and self.private is not None else self.original
            self._run(forward, subset, plan, kwargs)
        if context.recorded is not None:
            hidden, residual = kwargs[self.hidden], kwargs.get("residual") if context.adds_residual else None
            norms = (hidden if residual is None else hidden + residual).float().norm(dim=-1)
            context.recorded.append((self.index, norms.flatten().tolist()))
        return (kwargs[self.hidden], kwargs.get("residual")) if self.has_residual else kwargs[self.hidden]

    def _run(self, forward: Callable[..., Any], subset: TokenSubset | None, plan: StepPlan, kwargs: Any) -> None:
        """Replace hidden states and residual in ``kwargs`` by a layer's output, for the tokens of a subset."""
        context = self.context
        if subset is None:
            kwargs.update(self._named(context.run(forward, plan.tokens, **kwargs)))
            return
        assert context.attention is not None
        with context.attention(subset) as tokens:
            output = context.run(forward, len(tokens), **select(kwargs, tokens, plan.tokens))
        for name, part in self._named(output).items():
            before = kwargs.get(name)
            if before is None and part is not None:
                # The first layer turns its input into the residual; a token that skips it has all its state in hidden.
                before = torch.zeros_like(kwargs[self.hidden])
            # None: a model family that adds the residual inside the layer.
            kwargs[name] = None if part is None else before.index_copy(before.ndim - 2, tokens, part)

    def _named(self, output: Any) -> dict[str, Any]:
        """Hidden states and residual of a layer's output, by the names of the next layer's arguments."""
        if self.has_residual:
            return dict(zip((self.hidden, "residual"), output, strict=True))
        assert isinstance(output, Tensor), "a layer that returns more than hidden states"
        return {self.hidden: output}

    def _change(self, module: nn.Module, places: Any, kwargs: dict[str, Any]) -> None:
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
