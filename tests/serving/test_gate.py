"""Gates on layers like those of vLLM: each token passes its own layers, and the adapter's modules before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.plans import LAYERS, SCHEDULES, plan
from skipdecode.errors import UnsupportedModel
from skipdecode.model.adapter import Adapter
from skipdecode.serving.gate import UnlikeArguments, add_gates
from skipdecode.serving.steps import DepthTables, TokenSubset

MIXED = [(2.0, 3, 0, 5), (1.0, 2, 9, 1), (4.0, 5, 3, 4), (3.0, 4, 2, 6)]
UNIFORM = [(4.0, 3, 9, 1)]


class Native(nn.Module):
    """A layer as most of vLLM's: positions first, a residual that is a part of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Any]:
        self.calls += 1
        assert len(positions) == len(hidden_states)
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(self.mix(residual)) * positions[:, None], residual


class Adding(Native):
    """Adds inside the layer, and hands no residual on: MiniCPM, Gemma 4."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Any]:
        return hidden_states + torch.tanh(self.mix(hidden_states)) * positions[:, None], None


class Ignoring(Adding):
    """Hands its input on as a residual that nothing adds: Cohere, EXAONE 4, PhiMoE."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Any]:
        return super().forward(positions, hidden_states, None)[0], hidden_states


class Plain(Native):
    """A layer of the Transformers backend: hidden states with a batch of one, rotations by keyword."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], ids: Tensor
    ) -> Any:
        cos, sin = position_embeddings
        assert cos.shape[1] == ids.shape[1] == hidden_states.shape[1]
        return hidden_states + torch.tanh(self.mix(hidden_states * cos + sin)) * ids[..., None]


FAMILIES = [Native, Adding, Ignoring, Plain]


def run(family: type[nn.Module], layers: Iterable[Any], tokens: int) -> Tensor:
    """A pass as vLLM's models make one."""
    hidden: Any = torch.arange(tokens * 4.0).reshape(tokens, 4).sin()
    positions = torch.arange(1, tokens + 1)
    if family is Plain:
        hidden = hidden[None]
        rotations = torch.full((1, tokens, 4), 0.5), torch.linspace(0, 1, tokens)[None, :, None].expand(1, tokens, 4)
        ids = positions[None]
        for layer in layers:
            hidden = layer.forward(hidden, position_embeddings=rotations, ids=ids)
        return hidden[0]
    residual = None
    for layer in layers:
        hidden, residual = layer.forward(positions, hidden, residual)
    return hidden + residual if family is Native else hidden


@contextmanager
def attention(subset: TokenSubset) -> Iterator[Tensor]:
    """These layers have no attention to restrict."""
    yield torch.from_numpy(subset.tokens)


class Before(nn.Module):
    """An adapter's module, as if it were a layer of the family itself."""

    def __init__(self, module: nn.Module, family: type[nn.Module]) -> None:
        super().__init__()
        self.module, self.family = module, family

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.family is Plain:
            return self.module(args[0])
        _, hidden, residual = args
        if self.family is not Native:
            return self.module(hidden), residual
        return self.module(hidden if residual is None else hidden + residual), torch.zeros_like(hidden)


@pytest.mark.parametrize("requests", [MIXED, UNIFORM], ids=["mixed", "uniform"])
@pytest.mark.parametrize("adapts", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group_size", [1, 3])
@torch.no_grad()
def test_each_token_passes_its_own_layers_and_modules(
    family: type[nn.Module], adapts: bool, requests: Any, group_size: int
) -> None:
    """As in a model that has each token's layers alone, with the adapter's modules before them."""
    adapter = Adapter(4, 3, SCHEDULES)
    generator = torch.Generator().manual_seed(0)
    for weight in adapter.parameters():
        nn.init.normal_(weight, std=0.5, generator=generator)
    step = plan(requests, DepthTables(SCHEDULES, adapter if adapts else None))
    layers = nn.ModuleList(family() for _ in range(LAYERS))
    expected = []
    for token, row in enumerate(step.runs):
        running = np.flatnonzero(row).tolist()
        modules = adapter.changes(running) if adapts else {}
        alone: list[nn.Module] = []
        for index, layer in enumerate(layers):
            alone += [Before(modules[index], family)] if index in modules else []
            alone += [layer] if index in running else []
        expected.append(run(family, alone, step.tokens)[token])
    full = run(family, layers, step.tokens)
    context = add_gates(nn.ModuleDict({"layers": layers}), LAYERS)
    context.adds_residual = family is Native
    context.group_size = group_size
    with context.following(step, attention):
        found = run(family, layers, step.tokens)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(family, layers, step.tokens), full)
    assert context.run_tokens == step.runs.sum() < context.full_tokens


def test_layers_that_no_token_needs_are_not_called() -> None:
    """That is where the time goes. Layers that are called past their gates are an error, as in a compiled graph."""
    step = plan([(2.0, 3, 30, 1), (4.0, 3, 30, 1)])
    layers = nn.ModuleList(Native() for _ in range(LAYERS))
    context = add_gates(nn.ModuleDict({"layers": layers}), LAYERS)
    with context.following(step, attention):
        run(Native, layers, step.tokens)
    calls: list[Any] = [layer.calls for layer in layers]
    assert calls == [int(count > 0) for count in step.counts]
    assert sum(calls) < LAYERS
    with pytest.raises(RuntimeError, match="something bypasses gates"), context.following(step, attention):
        pass


@pytest.mark.parametrize("argument", ["positions", "hidden", "residual"])
def test_layers_with_arguments_of_their_own_do_not_run_together(argument: str) -> None:
    """A group passes the arguments of its first layer to all, and its output past what the model does between them."""
    step = plan(UNIFORM)
    layers = nn.ModuleList(Native() for _ in range(LAYERS))
    context = add_gates(nn.ModuleDict({"layers": layers}), LAYERS)
    context.group_size = 2
    positions, hidden = torch.arange(step.tokens), torch.ones(step.tokens, 4)
    with pytest.raises(UnlikeArguments), context.following(step, attention):  # noqa: PT012
        hidden, residual = layers[0].forward(positions, hidden, None)
        changed = {"positions": positions, "hidden": hidden, "residual": residual}
        changed[argument] = changed[argument].clone()
        layers[1].forward(*changed.values())


def test_two_stacks_are_refused() -> None:
    """Which of them to skip cannot be told."""
    stacks = {name: nn.ModuleList(Native() for _ in range(LAYERS)) for name in ("one", "two")}
    with pytest.raises(UnsupportedModel, match="2 stacks of 8 decoder layers"):
        add_gates(nn.ModuleDict(stacks), LAYERS)
