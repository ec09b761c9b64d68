"""Gates on the decoder layers of vLLM's model: each runs its layer on the tokens that need it and passes on the rest.

Imports no vLLM. One class serves vLLM's native layers, which return hidden states and a residual, and those of its
Transformers backend. Like the gate for transformers, this one replaces ``forward`` of the layer instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .steps import Part, Step

#: Returns a context manager within which attention sees only the tokens of a part; it yields their indices.
Narrowed = Callable[[Part], AbstractContextManager[Tensor]]


class Plan:
    """The state that all gates of a model share: the current step, how to narrow attention to a part, and counters."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.step: Step | None = None
        self.narrowed: Narrowed | None = None
        self.adds_residual = True  # a layer's input is the sum of hidden states and residual, where it takes one
        self.extras: int | None = None  # values after hidden states in a layer's tuple; None: it returns a tensor
        self.layers: Any = None  # a CompiledLayers, which runs a layer in another way than by its ``forward``
        #: Since the start: steps, and layer-tokens (one token in one layer) at full depth, needed, and run.
        self.steps = self.full_tokens = self.needed_tokens = self.run_tokens = 0

    @contextmanager
    def following(self, step: Step, narrowed: Narrowed | None) -> Iterator[None]:
        """Return a context within which gates follow ``step``; elsewhere every layer runs for every token.

        Args:
            step: its plan.
            narrowed: may be None for a step at full depth.

        Raises:
            RuntimeError: the step did not run as planned, as a compiled graph would silently bypass the gates.
        """
        planned = self.run_tokens + sum(step.counts)
        self.count(step, step.is_full)  # a compiled graph does not call the gates' counters
        self.step, self.narrowed = step, narrowed
        try:
            yield
        finally:
            self.step = self.narrowed = None
        if self.run_tokens != planned:
            raise RuntimeError(
                f"{self.run_tokens} tokens times layers have gone through the gates where {planned} were planned: "
                "something calls layers past them, or twice"
            )

    def count(self, step: Step, has_run: bool) -> None:
        """Count a step; ``has_run``: gates will not count the layers that it runs."""
        needed = sum(step.counts)
        self.full_tokens += step.tokens * len(step.counts)
        self.needed_tokens += needed
        self.run_tokens += has_run * needed
        self.steps += 1

    def forget(self) -> None:
        """Set the counters to 0."""
        self.steps = self.full_tokens = self.needed_tokens = self.run_tokens = 0


class Gate:
    """Replaces the ``forward`` of one layer."""

    def __init__(self, layer: nn.Module, plan: Plan, index: int) -> None:
        self.original: Callable[..., Any] = layer.forward
        self.plan, self.index = plan, index
        names = inspect.signature(self.original).parameters
        self.has_residual = "residual" in names
        self.position = {name: i for i, name in enumerate(names)}
        self.__signature__ = inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the tokens that need it; return the other tokens' hidden states (and residual) unchanged."""
        plan = self.plan
        if plan.step is None:
            return self.original(*args, **kwargs)
        if plan.step.changes is not None:
            args, kwargs = self._changed(plan.step, args, kwargs)
        count = plan.step.counts[self.index]
        plan.run_tokens += 0 if plan.step.is_full else count
        if count == plan.step.tokens:
            output = self._run(self.original, args, kwargs, count)
            plan.extras = len(output) - 1 if isinstance(output, tuple) else None
            return output
        hidden = self._given("hidden_states", args, kwargs)
        residual = self._given("residual", args, kwargs) if self.has_residual else None
        if count == 0:
            return (hidden, residual) if self.has_residual else self._like_output(hidden)
        return self._run_part(plan.step, hidden, residual, args, kwargs)

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> Any:
        layers = self.plan.layers
        return forward(*args, **kwargs) if layers is None else layers.run(forward, args, kwargs, tokens)

    def _run_part(
        self, step: Step, hidden: Tensor, residual: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        part = step.part(self.index)
        assert self.plan.narrowed is not None
        with self.plan.narrowed(part) as tokens:
            args, kwargs = cut(args, tokens, step.tokens), cut(kwargs, tokens, step.tokens)
            output = self._run(self.original, args, kwargs, len(tokens))
        axis = hidden.ndim - 2
        if not self.has_residual:
            ran = output[0] if isinstance(output, tuple) else output
            self.plan.extras = len(output) - 1 if isinstance(output, tuple) else None
            return self._like_output(hidden.index_copy(axis, tokens, ran))
        ran, ran_residual = output
        if ran_residual is None:  # model families that add the residual inside the layer
            return hidden.index_copy(axis, tokens, ran), None
        if residual is None:
            # The first layer turns its input into the residual; a token that skips it has all of its state in hidden.
            residual = torch.zeros_like(hidden)
        return hidden.index_copy(axis, tokens, ran), residual.index_copy(axis, tokens, ran_residual)

    def _changed(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with hidden states as the adapter changes them; a residual that is added becomes 0."""
        assert step.changes is not None
        for module, where in step.changes.before(self.index):
            hidden = self._given("hidden_states", args, kwargs)
            is_sum = self.has_residual and self.plan.adds_residual
            residual = self._given("residual", args, kwargs) if is_sum else None
            whole = hidden if residual is None else hidden + residual
            if where is None:
                hidden = self._run(module.forward, (whole,), {}, step.tokens)
                residual = None if residual is None else torch.zeros_like(residual)
            else:
                tokens, axis = torch.from_numpy(where).to(hidden.device), hidden.ndim - 2
                changed = self._run(module.forward, (whole.index_select(axis, tokens),), {}, len(tokens))
                hidden = hidden.index_copy(axis, tokens, changed)
                residual = None if residual is None else residual.index_fill(axis, tokens, 0)
            args, kwargs = self._put("hidden_states", hidden, args, kwargs)
            if residual is not None:
                args, kwargs = self._put("residual", residual, args, kwargs)
        return args, kwargs

    def _put(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with another value where :meth:`_given` finds the one of this name."""
        if name in kwargs:
            return args, kwargs | {name: value}
        index = self.position.get(name, 0)
        return (*args[:index], value, *args[index + 1 :]), kwargs

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument with this name, or the first one if the layer names it otherwise."""
        if name in kwargs:
            return kwargs[name]
        index = self.position.get(name, 0)
        return args[index] if index < len(args) else None

    def _like_output(self, hidden: Tensor) -> Any:
        return hidden if self.plan.extras is None else (hidden, *[None] * self.plan.extras)


def cut(value: Any, tokens: Tensor, count: int) -> Any:
    """Select tokens from every tensor that has one entry per token of the step, also in tuples, lists and dicts.

    Args:
        value: an argument of a layer.
        tokens: (tokens of the part,), indices in the step.
        count: how many tokens the step has.
    """
    if isinstance(value, tuple | list):
        return type(value)(cut(item, tokens, count) for item in value)
    if isinstance(value, dict):
        return {name: cut(item, tokens, count) for name, item in value.items()}
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    axis = token_axis(value)
    return value.index_select(axis, tokens) if value.shape[axis] == count else value


def token_axis(value: Tensor) -> int:
    """Return which axis of a tensor has an entry per token, if one has.

    It is the last of positions (integers or 1-D), the second to last of hidden states and rotations.
    """
    return value.ndim - 1 if value.ndim == 1 or not value.is_floating_point() else value.ndim - 2


def layers_of(model: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """Return a model's decoder layers.

    Raises UnsupportedModel if the model does not have exactly one stack of ``num_layers`` layers.
    """
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    inner = {id(part) for stack in stacks for part in stack.modules() if part is not stack}
    # Gemma 4 holds the same layers in several lists.
    stacks = list({tuple(map(id, stack)): stack for stack in stacks if id(stack) not in inner}.values())
    if len(stacks) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} should hold one stack of {num_layers} decoder layers; {len(stacks)} were found"
        )
    return list(stacks[0])


def add_gates(model: nn.Module, num_layers: int) -> Plan:
    """Put a gate on each decoder layer, and return the plan that they share. Raises as :func:`layers_of`."""
    plan = Plan(num_layers)
    for index, layer in enumerate(layers_of(model, num_layers)):
        layer.forward = Gate(layer, plan, index)
    return plan
