"""Gates on the decoder layers of vLLM's model: each runs for the tokens that need it, and passes the others on.

No vLLM here. One class serves native layers, which hand a residual beside the hidden states, and those of the
Transformers backend. The gate sits on the layer instance, as ours for transformers does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .depths import Part, Step

#: Within it, attention knows only the tokens of this part.
Narrowed = Callable[[Part], AbstractContextManager[Any]]


class Plan:
    """What the gates of one model share: the step under way, and how attention is narrowed to a part of it."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.step: Step | None = None
        self.narrowed: Narrowed | None = None
        self.indices: dict[int, Tensor] = {}  # of a part's tokens, on the device
        self.extras: int | None = None  # what layers return beside hidden states, as a tuple; None: a tensor alone
        #: Tokens times layers since the start: of full depth, needed by schedules, run.
        self.full_tokens, self.needed_tokens, self.run_tokens = 0, 0, 0
        self._planned_run = 0  # run_tokens at the end of the step under way
        #: Steps since the start, and layers that any of their tokens needed.
        self.steps, self.entered_layers = 0, 0

    def begin(self, step: Step, narrowed: Narrowed | None) -> None:
        """The gates follow ``step`` until :meth:`end`; a full one needs no narrowing."""
        self.step, self.narrowed, self.indices = step, narrowed, {}
        needed = sum(step.counts)
        self.full_tokens += step.tokens * len(step.counts)
        self.needed_tokens += needed
        self._planned_run = self.run_tokens + needed
        self.run_tokens += step.is_full * needed  # a compiled graph counts nothing
        self.steps += 1
        self.entered_layers += sum(count > 0 for count in step.counts)

    def end(self) -> None:
        """The gates are open again."""
        self.step = self.narrowed = None

    def require_followed(self) -> None:
        """Raises RuntimeError if the step that ended ran other layers: compiled graphs would, without a word."""
        if self.run_tokens != self._planned_run:
            raise RuntimeError(
                f"{self.run_tokens} tokens times layers have gone through the gates where {self._planned_run} were "
                "planned: something calls layers past them, or twice"
            )

    def counted(self) -> dict[str, int]:
        """The counters by name."""
        tokens = {"full": self.full_tokens, "needed": self.needed_tokens, "run": self.run_tokens}
        return tokens | {"steps": self.steps, "entered": self.entered_layers}


class Gate:
    """Replaces one layer's ``forward``."""

    def __init__(self, layer: nn.Module, plan: Plan, index: int) -> None:
        self.original: Callable[..., Any] = layer.forward
        self.plan, self.index = plan, index
        names = inspect.signature(self.original).parameters
        self.has_residual = "residual" in names
        self.position = {name: i for i, name in enumerate(names)}
        self.__signature__ = inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output for the tokens that run it; the other tokens' hidden states (and residual) as given."""
        plan = self.plan
        if plan.step is None:
            return self.original(*args, **kwargs)
        count = plan.step.counts[self.index]
        plan.run_tokens += 0 if plan.step.is_full else count
        if count == plan.step.tokens:
            output = self.original(*args, **kwargs)
            plan.extras = len(output) - 1 if isinstance(output, tuple) else None
            return output
        hidden = self._given("hidden_states", args, kwargs)
        residual = self._given("residual", args, kwargs) if self.has_residual else None
        if count == 0:
            return (hidden, residual) if self.has_residual else self._like_output(hidden)
        return self._run_part(plan.step, hidden, residual, args, kwargs)

    def _run_part(
        self, step: Step, hidden: Tensor, residual: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        part = step.part(self.index)
        assert self.plan.narrowed is not None
        if id(part) not in self.plan.indices:
            self.plan.indices[id(part)] = torch.from_numpy(part.tokens).to(hidden.device)
        tokens = self.plan.indices[id(part)]
        cut = Cut(tokens, step.tokens)
        with self.plan.narrowed(part):
            output = self.original(*cut(args), **cut(kwargs))
        axis = hidden.ndim - 2
        if not self.has_residual:
            ran = output[0] if isinstance(output, tuple) else output
            self.plan.extras = len(output) - 1 if isinstance(output, tuple) else None
            return self._like_output(hidden.index_copy(axis, tokens, ran))
        ran, ran_residual = output
        if ran_residual is None:  # families that add by themselves, and only hand the name on
            return hidden.index_copy(axis, tokens, ran), None
        if residual is None:
            # The first layer makes the residual of its input. Of a token that passes it, nothing is in there yet.
            residual = torch.zeros_like(hidden)
        return hidden.index_copy(axis, tokens, ran), residual.index_copy(axis, tokens, ran_residual)

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument of this name; of layers that name it otherwise, the first one."""
        if name in kwargs:
            return kwargs[name]
        index = self.position.get(name, 0)
        return args[index] if index < len(args) else None

    def _like_output(self, hidden: Tensor) -> Any:
        return hidden if self.plan.extras is None else (hidden, *[None] * self.plan.extras)


class Cut:
    """Takes the given tokens out of everything that has one entry per token of the step.

    Args:
        tokens: (part,), indices.
        count: tokens of the whole step.
    """

    def __init__(self, tokens: Tensor, count: int) -> None:
        self.tokens, self.count = tokens, count

    def __call__(self, value: Any) -> Any:
        """``value`` with its tensors cut, through tuples, lists and dicts."""
        if isinstance(value, tuple | list):
            return type(value)(self(item) for item in value)
        if isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        # Positions, alone or with sections before them; hidden states and rotations, with a size after them.
        axis = value.ndim - 1 if value.ndim == 1 or not value.is_floating_point() else value.ndim - 2
        return value.index_select(axis, self.tokens) if value.shape[axis] == self.count else value


def add_gates(model: nn.Module, num_layers: int) -> Plan:
    """Gates on the model's decoder layers.

    Raises:
        UnsupportedModel: the stack of decoder layers cannot be told.
    """
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    inner = {id(part) for stack in stacks for part in stack.modules() if part is not stack}
    # Gemma 4 holds its layers in several lists.
    stacks = list({tuple(map(id, stack)): stack for stack in stacks if id(stack) not in inner}.values())
    if len(stacks) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} should hold one stack of {num_layers} decoder layers; {len(stacks)} were found"
        )
    plan = Plan(num_layers)
    for index, layer in enumerate(stacks[0]):
        layer.forward = Gate(layer, plan, index)
    return plan
