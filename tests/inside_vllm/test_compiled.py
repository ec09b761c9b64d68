"""Compiled, as vLLM runs by default: full steps by vLLM's graph of the model, steps that skip by graphs of layers.

A gate inside a compiled graph freezes as it was when it was traced, open, and nothing says so: texts do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from helpers.engine import Reference, Request, check_among_leavers, engine, runner, serve
from skipdecode.loading.load import DEMO
from skipdecode.serving import compile as compiled_module
from skipdecode.serving import runner as runner_module
from skipdecode.serving.compile import CompiledLayers
from skipdecode.serving.gate import decoder_layers

SPEEDUPS = (1.0, 2.0, 3.0, 5.0)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """An engine that has compiled the model, and cuts long prompts into pieces."""
    with engine(DEMO, enforce_eager=False, max_num_batched_tokens=128, enable_chunked_prefill=True) as made:
        yield made


def requests_of(reference: Reference, count: int, speedups: tuple[float, ...], new: int) -> list[Request]:
    """Random requests for inputs of the checkpoint."""
    source = random.Random(0)
    lines = (DEMO / "inputs.csv").read_text(encoding="utf-8").splitlines()[1:]
    prompts = [tuple(reference.tokenizer(f"{line.strip(chr(34))} ->")["input_ids"]) for line in lines[:30]]
    return [Request(source.choice(prompts), source.choice(speedups), new) for _ in range(count)]


def test_texts_are_those_of_generate(compiled: Any) -> None:
    """At full depth and below it, in steps of both."""
    reference = Reference("demo")
    requests = requests_of(reference, 48, SPEEDUPS, 40)
    served = serve(compiled, requests, arrive=lambda step: 1 + step % 2)
    wrong = [i for i, text in enumerate(reference.texts(requests)) if served.tokens[i] != text]
    assert not wrong
    plan = runner(compiled).skip_context
    assert plan.run_tokens == plan.needed_tokens < plan.full_tokens  # the graph itself counts nothing


def test_long_prompts_in_pieces_among_clients_that_leave(compiled: Any) -> None:
    """Requests of all speeds come and go at any step: the others' texts stay, and no block is lost."""
    reference, source = Reference("demo", most_new=40), random.Random(1)
    requests = requests_of(reference, 64, SPEEDUPS, 40)
    for place in range(0, 64, 3):
        prompt = tuple(source.choices(range(3, 1000), k=source.randint(100, 200)))
        requests[place] = Request(prompt, source.choice(SPEEDUPS), source.randint(1, 40))
    check_among_leavers(compiled, requests, reference, source)


def test_steps_run_the_decoder_layers_their_plan_alone(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where attention is computed, below all graphs."""
    plan = runner(compiled).skip_context
    called, expected = [0], [0]
    following = plan.following

    def counted(step: Any, narrowed: Any) -> Any:
        expected[0] += sum(count > 0 for count in step.counts)
        return following(step, narrowed)

    def counting(forward: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            called[0] += 1
            return forward(*args, **kwargs)

        return attend

    monkeypatch.setattr(plan, "following", counted)
    attentions: list[Any] = [part for part in runner(compiled).model.modules() if isinstance(part, Attention)]
    for attention in attentions:
        monkeypatch.setattr(attention.impl, "forward", counting(attention.impl.forward))
    steps = plan.steps
    serve(compiled, requests_of(Reference("demo"), 8, (5.0,), 24))
    assert called == expected
    assert 0 < called[0] < len(attentions) * (plan.steps - steps) / 3


def test_every_layer_is_compiled_once_for_all(compiled: Any) -> None:
    """Else steps that skip would be as slow as plain Python, and the start as slow as one compilation a layer."""
    ours = runner(compiled)
    layers = ours.skip_context.layers
    assert {forward.__self__ for forward, _ in layers.compiled} == set(decoder_layers(ours.model, ours.skip_context.num_layers))
    assert len(layers.graphs) == 1


def test_without_a_compiler_steps_run_plain(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is a warning, and texts stay."""
    ours, reference = runner(compiled), Reference("demo")
    said: list[str] = []

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled_module, "compile_fx", broken)
    monkeypatch.setattr(ours.skip_context, "layers", CompiledLayers({}))
    monkeypatch.setattr(runner_module.logger, "warning", lambda *words: said.append(" ".join(words)))
    ours.compile_layers()
    assert len(said) == 1
    assert "no compiler here" in said[0]
    assert ours.skip_context.layers is None
    requests = requests_of(reference, 4, SPEEDUPS, 12)
    assert list(serve(compiled, requests).tokens.values()) == reference.texts(requests)


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


@pytest.fixture(scope="module")
def layers() -> tuple[CompiledLayers, list[Layer]]:
    """Three of a kind, the last with another constant, compiled for eight tokens with a residual."""
    torch.manual_seed(0)
    made, found = CompiledLayers({}), [Layer(), Layer(), Layer(eps=4.0)]
    with torch.no_grad(), made.compiling():
        for layer in found:
            made.run(layer.forward, (torch.randn(8, 6), torch.randn(8, 6)), {}, 8)
    return made, found


def ran_plain(layers: tuple[CompiledLayers, list[Layer]], arguments: Callable[[], tuple[Any, ...]], tokens: int) -> int:
    """How many of the layers ran without a graph; each returns what it does outside the compiler."""
    made, found, count = *layers, 0
    for layer in found:
        given = arguments()
        with torch.no_grad():
            expected, before = layer(*given), layer.plain
            torch.testing.assert_close(made.run(layer.forward, given, {}, tokens), expected)
        count += layer.plain - before
    return count


def test_decoder_layers_one_graph_keep_weights_of_their_own(layers: tuple[CompiledLayers, list[Layer]]) -> None:
    """The third has another constant, so another graph."""
    assert len(layers[0].graphs) == 2
    assert not ran_plain(layers, lambda: (torch.randn(8, 6), torch.randn(8, 6)), 8)


@pytest.mark.parametrize("tokens", [1, 2, 6, 13])
def test_any_number_of_tokens_runs_compiled(layers: tuple[CompiledLayers, list[Layer]], tokens: int) -> None:
    """One, as many as the hidden states are wide, more than it was compiled for."""
    assert not ran_plain(layers, lambda: (torch.randn(tokens, 6), torch.randn(tokens, 6)), tokens)


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
