"""Compiled, as vLLM runs by default: full steps by vLLM's graph of the model, steps that skip by graphs of layers.

A gate inside a compiled graph freezes as it was when it was traced, open, and nothing says so: texts do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from helpers.engine import (
    Reference,
    check_among_leavers,
    check_layers,
    count_calls,
    demo_prompts,
    engine,
    requests_of,
    runner,
    serve,
)
from skipdecode.serving import compile as compile_module
from skipdecode.serving import runner as runner_module
from skipdecode.serving.compile import CompiledLayers
from skipdecode.serving.gate import LayerGroup, decoder_layers


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """An engine that has compiled the model, and cuts long prompts into pieces."""
    with engine(enforce_eager=False, max_num_batched_tokens=128, enable_chunked_prefill=True) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(most_new=40)


def test_texts_are_those_of_generate(compiled: Any, reference: Reference) -> None:
    """At full depth and below it, in steps of both, among clients that leave."""
    requests = requests_of(demo_prompts(reference), 96, seed=0, most=40)
    texts = reference.texts(requests)
    served = serve(compiled, requests[:32], arrive=lambda step: 1 + step % 2)
    assert served.texts() == texts[:32]
    check_layers(compiled)  # vLLM's graph itself counts nothing
    check_among_leavers(compiled, requests[32:], texts[32:], seed=1)


def test_a_skipped_layer_calls_no_attention(
    compiled: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is where the time goes: each step's attention is that of the layers that some token needs."""
    ours = runner(compiled)
    expected = []
    count = ours.skip_context.count

    def planned(plan: Any, has_run: bool) -> None:
        expected.append(sum(tokens > 0 for tokens in plan.counts))
        count(plan, has_run)

    monkeypatch.setattr(ours.skip_context, "count", planned)
    attentions: list[Any] = [part for part in ours.model.modules() if isinstance(part, Attention)]
    calls = [count_calls(attention.impl, "forward", monkeypatch) for attention in attentions]
    serve(compiled, requests_of(demo_prompts(reference), 8, seed=2, speedups=(5.0,), most=24))
    called = sum(map(len, calls))
    assert called == sum(expected)
    assert max(expected) == len(attentions)  # prompts
    assert 0 < min(expected) < len(attentions) / 3


def test_every_layer_is_compiled_once_for_all(compiled: Any) -> None:
    """Else steps that skip would be as slow as plain Python, and the start as slow as one compilation a layer."""
    ours = runner(compiled)
    layers = ours.skip_context.layers
    modules = {forward.__self__ for forward, _ in layers.compiled}
    groups = {module for module in modules if isinstance(module, LayerGroup)}
    assert modules - groups == set(decoder_layers(ours.model, 24))
    assert groups == {group for group in ours.skip_context.groups.values() if group.parts}
    assert len(layers.graphs) <= 2 * runner_module.GROUP  # of one layer or more, with the first or without


def test_without_a_compiler_steps_run_plain(
    compiled: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is a warning, and texts stay."""
    ours = runner(compiled)
    said: list[str] = []

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compile_module, "compile_fx", broken)
    monkeypatch.setattr(ours.skip_context, "layers", CompiledLayers({}))
    monkeypatch.setattr(runner_module.logger, "warning", lambda *words: said.append(" ".join(words)))
    ours.compile_layers()
    assert len(said) == 1
    assert "no compiler here" in said[0]
    assert ours.skip_context.layers is None
    requests = requests_of(demo_prompts(reference), 4, seed=3, most=12)
    assert serve(compiled, requests).texts() == reference.texts(requests)


class Layer(nn.Module):
    """Takes an optional residual, as vLLM's do, and has a constant of its own."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(6)), eps
        self.plain = 0

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None, scale: Any = 1.0) -> Any:
        """A norm, which counts how often it ran without a graph."""
        if not torch.compiler.is_compiling():
            self.plain += 1
        whole = hidden if residual is None else hidden + residual
        factor = whole.square().mean(-1, keepdim=True) + self.eps
        return whole * self.weight * float(scale) / factor.sqrt(), whole


def arguments(*values: Any) -> dict[str, Any]:
    return dict(zip(("hidden", "residual", "scale"), values, strict=False))


@pytest.fixture(scope="module")
def layers() -> tuple[CompiledLayers, list[Layer]]:
    """Three of a kind, the last with another constant, compiled for eight tokens with a residual."""
    torch.manual_seed(0)
    made, found = CompiledLayers({}), [Layer(), Layer(), Layer(eps=4.0)]
    made.compiles = True
    with torch.no_grad():
        for layer in found:
            made.run(layer.forward, arguments(torch.randn(8, 6), torch.randn(8, 6)), 8)
    made.compiles = False
    return made, found


def ran_plain(layers: tuple[CompiledLayers, list[Layer]], make: Callable[[], tuple[Any, ...]], tokens: int) -> int:
    """How many of the layers ran without a graph; each returns what it does outside the compiler."""
    made, found = layers
    count = 0
    for layer in found:
        kwargs = arguments(*make())
        with torch.no_grad():
            expected, before = layer(**kwargs), layer.plain
            torch.testing.assert_close(made.run(layer.forward, kwargs, tokens), expected)
        count += layer.plain - before
    return count


@pytest.mark.parametrize("tokens", [1, 2, 6, 8, 13])
def test_any_number_of_tokens_runs_compiled(layers: tuple[CompiledLayers, list[Layer]], tokens: int) -> None:
    """One, as many as the hidden states are wide, more than it was compiled for; the third layer has its own graph."""
    assert not ran_plain(layers, lambda: (torch.randn(tokens, 6), torch.randn(tokens, 6)), tokens)
    assert len(layers[0].graphs) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(5, 6),),
        lambda: (torch.randn(5, 6), None),
        lambda: (torch.randn(5, 6), torch.randn(5, 6), 3.0),
        lambda: (torch.randn(6, 5).T, torch.randn(5, 6)),
        lambda: (torch.randn(5, 6).double(), torch.randn(5, 6)),
        lambda: (torch.randn(2, 5, 6), torch.randn(2, 5, 6)),
        lambda: (torch.randn(5, 6), torch.randn(1, 6)),
        lambda: (torch.randn(5, 6), torch.randn(5, 6), Fraction(1, 2)),
    ],
    ids=["fewer", "none", "constant", "strides", "dtype", "axes", "broadcast", "type"],
)
def test_arguments_of_another_look_run_plain(layers: tuple[CompiledLayers, list[Layer]], other: Any) -> None:
    """Without guards, a compiled layer would compute something else, or read past an end."""
    assert ran_plain(layers, other, 5) == 3
