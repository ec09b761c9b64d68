"""CALM is what it is called, on the machinery of every other method."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import skipdecode
from calm import ConfidenceCache, calm, confidence_caches, exits
from helpers.families import build
from helpers.tiny import TEXTS
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import UnsupportedModel
from skipdecode.generation.generate import generate_ids
from skipdecode.generation.stats import GenerationOutput, GenerationStats
from skipdecode.model.cache_name import CACHE
from skipdecode.model.inspect import decoder_layers
from skipdecode.training.read_out import read_out


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return skipdecode.load(str(checkpoint))


OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1}


def decode(model: tuple[Any, Any], factory: Any, batch_size: int = 4, **options: Any) -> GenerationOutput:
    network, tokenizer = model
    ids = encode_prompts(tokenizer, TEXTS[:4])
    with exits(network):
        return generate_ids(network, tokenizer, ids, factory, batch_size, **OPTIONS | options)


def texts(output: GenerationOutput) -> list[str]:
    return [completion.text for completion in output.completions]


def sure_of_itself(network: Any) -> None:
    """As confident of its random tokens as a trained model is of its own."""
    with torch.no_grad():
        network.model.decoder.final_layer_norm.weight.mul_(60)


@torch.no_grad()
def calm_by_hand(network: Any, ids: list[int], threshold: float, horizon: int, count: int) -> list[int]:
    """Greedy CALM of one sequence without a cache: the layers above an exit see the exit's hidden state.

    Keys and values of a layer depend on its input alone, so a pass over all positions in which each position's hidden
    state is frozen after its exit has the same ones as decoding.
    """
    reader = read_out(network)
    depths = [8] * (len(ids) - 1)  # of each position that is fed
    text = list(ids)
    for step in range(count):
        states = frozen_states(network, torch.tensor([text]), [*depths, 8])
        exit_at = 8
        if step:
            bar = min(max(0.9 * threshold + 0.1 * math.exp(-4 * step / horizon), 0), 1)
            exit_at = next((d for d in range(1, 8) if margin(reader(states[d][0, -1])) > bar), 8)
        depths.append(exit_at)
        text.append(int(reader(states[exit_at][0, -1]).argmax()))
    return text[len(ids) :]


def margin(logits: Tensor) -> float:
    top = logits.float().softmax(-1).topk(2).values
    return float(top[0] - top[1])


def frozen_states(network: Any, ids: Tensor, depths: list[int]) -> list[Tensor]:
    """Hidden states after each layer, where each position keeps its state from its depth on."""
    states: list[Tensor] = []

    def freeze(index: int, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not states:
            states.append(hidden)
        runs = torch.tensor([depth > index for depth in depths])[None, :, None]
        states.append(torch.where(runs, output, hidden))
        return states[-1]

    layers = decoder_layers(network)
    hooks = [
        layer.register_forward_hook(partial(freeze, index), with_kwargs=True) for index, layer in enumerate(layers)
    ]
    try:
        network(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states


@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_calm_is_its_plain_reference(model: tuple[Any, Any], threshold: float) -> None:
    """Left-padded batches with a cache generate what whole passes with frozen states do."""
    network, tokenizer = model
    sure_of_itself(network)
    output = decode(model, confidence_caches(network, threshold, 10))
    assert 1 < output.stats.row_depth < 8
    for prompt, completion in zip(encode_prompts(tokenizer, TEXTS[:4]), output.completions, strict=True):
        expected = calm_by_hand(network, prompt, threshold, 10, 10)
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_nobody_confident_is_the_full_model(model: tuple[Any, Any]) -> None:
    network, _ = model
    stock = texts(decode(model, None))
    output = decode(model, confidence_caches(network, 1.2, 10))
    assert texts(output) == stock
    assert output.stats.average_depth == output.stats.row_depth == 8
    assert texts(decode(model, None)) == stock


def kept(caches: list[Any], factory: Callable[[Any], DynamicCache]) -> Any:
    """The factory, whose caches are kept."""

    def make(network: Any) -> DynamicCache:
        caches.append(factory(network))
        cache: DynamicCache = caches[-1]
        return cache

    return make


def test_everybody_confident_leaves_at_the_first_layer_and_stores_all_keys(model: tuple[Any, Any]) -> None:
    network, _ = model
    caches: list[Any] = []
    output = decode(model, kept(caches, confidence_caches(network, -1.0, 10)))
    assert output.stats.average_depth == output.stats.row_depth == 1
    assert len({layer.keys.shape[2] for layer in caches[0].layers}) == 1
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[0].layers)
    assert output.stats.peak_kv_bytes == held


def test_a_batch_runs_at_least_what_its_sequences_do_and_they_do_not_depend_on_it(model: tuple[Any, Any]) -> None:
    network, _ = model
    sure_of_itself(network)
    factory = confidence_caches(network, 0.5, 10)
    together, alone = (decode(model, factory, size) for size in (4, 1))
    assert texts(together) == texts(alone)
    assert 1 < together.stats.row_depth < together.stats.average_depth <= 8
    assert alone.stats.row_depth == alone.stats.average_depth == pytest.approx(together.stats.row_depth)


def test_sequences_end_where_generation_ends_them(model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has met its end holds no batch up, and one that has not does."""
    network, tokenizer = model
    ids = encode_prompts(tokenizer, TEXTS[:4])
    padded = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    generated = network.generate(**padded, **OPTIONS, pad_token_id=tokenizer.pad_token_id)
    first, *others = [row[-10:].tolist() for row in generated]
    end = next((token for token in first if any(token not in row for row in others)), first[0])
    for eos, stops in ((end, [end]), (None, []), ([end, 1], sorted([end, 1]))):
        monkeypatch.setattr(network.generation_config, "eos_token_id", eos)
        caches: list[Any] = []
        factory = kept(caches, confidence_caches(network, 1.2, 10))
        output = decode(model, factory, eos_token_id=None)
        assert caches[-1].stops == stops
        # The first token is the prompt's; each later one is a step of its sequence.
        assert caches[-1].row_steps == sum(completion.tokens - 1 for completion in output.completions)


def test_outside_the_context_nothing_is_left_of_calm(checkpoint: Path) -> None:
    def state(network: Any) -> Any:
        return {name: dict(vars(module)) for name, module in network.named_modules()}

    network, _ = skipdecode.load(str(checkpoint))
    for attached in (True, False):
        before = state(network if attached else skipdecode.detach(network))
        with exits(network):
            cache = ConfidenceCache(network, read_out(network), -1.0, 10, [])
            network(torch.tensor([[5, 6]]), **{CACHE: cache})
            network(input_ids=torch.tensor([[7]]), **{CACHE: cache})
            assert cache.step_depths == [1]
        assert state(network) == before


@pytest.mark.parametrize("speedup", [1.5, 3.0, 6.0])
def test_a_threshold_stands_for_a_speedup(
    model: tuple[Any, Any], speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nine thresholds, the one at which sequences come nearest to the target."""
    network, _ = model
    monkeypatch.setattr(network.generation_config, "eos_token_id", 5)
    tried = []

    def generate(factory: Any) -> GenerationOutput:
        nines = -math.log10(1 - factory.keywords["threshold"])
        tried.append(factory.keywords["threshold"])
        layers = round(1000 * min(8, 1 + nines * 1.5))
        return GenerationOutput(GenerationStats(8, row_layers=layers, row_steps=1000))

    factory: Any
    factory, notes = calm(network, speedup, 12, generate)
    assert len(tried) == 9
    assert factory.keywords["threshold"] == notes["threshold"]
    assert notes["threshold_horizon"] == factory.keywords["horizon"] == 12
    assert factory.keywords["stops"] == [5]
    assert notes["held_out_token_ratio"] == pytest.approx(speedup, rel=0.02)


def test_recurrent_layers_are_refused_with_a_reason() -> None:
    """A state that a token skips is lost to the next."""
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        confidence_caches(build("qwen3.5"), 0.5, 10)
