"""The baselines are what they are called, on the same machinery: exits, confidence, pruning, their schedules."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase, Qwen3NextConfig, Qwen3NextForCausalLM

import skipdecode
from helpers.families import FAMILIES, build
from helpers.tiny import TEXTS, run
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import ModelError, ScheduleError, UnsupportedModel
from skipdecode.evaluation.early_exit import Calm, read_out
from skipdecode.evaluation.methods import METHODS, get_method
from skipdecode.evaluation.pruned import prune
from skipdecode.generation.generate import generate_ids
from skipdecode.generation.stats import GenerationStats
from skipdecode.latency.fitting import Lengths, batch_lengths, fit
from skipdecode.model.attach import teacher_forced
from skipdecode.model.inspect import decoder_layers
from skipdecode.schedule import Schedule
from skipdecode.training.losses import Distillation, Objective

LENGTHS = [44, 39, 40, 36, 35, 32, 25]
FITTED = ("skipdecode", "multi_exit", "calm", "d3", "hsd")


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return skipdecode.load(str(checkpoint))


# --- schedules


@pytest.mark.parametrize("layers", [24, 32])
@pytest.mark.parametrize("speedup", [2, 3, 4, 5])
@pytest.mark.parametrize("name", FITTED)
def test_what_a_method_achieves_is_what_was_asked_for(name: str, speedup: int, layers: int) -> None:
    plan = get_method(name).schedule(layers, speedup, LENGTHS)
    assert Lengths(LENGTHS).ratio(plan) == pytest.approx(speedup, rel=0.03)


@pytest.mark.parametrize("name", METHODS)
def test_at_1x_every_method_is_the_full_model(name: str) -> None:
    assert get_method(name).schedule(24, 1, LENGTHS).is_full


def test_constant_depth_is_as_near_as_whole_layers_come() -> None:
    for speedup in (2, 3, 4, 5):
        plan = get_method("unified").schedule(24, speedup, LENGTHS)
        others = [abs(24 / depth - speedup) for depth in range(1, 25)]
        assert abs(Lengths(LENGTHS).ratio(plan) - speedup) <= min(others) + 1e-9
        assert {0, 23} <= set(plan.layers(plan.depth(0)))


def test_first_and_last_layer_stay_where_the_papers_say_so() -> None:
    for name in ("d3", "hsd", "unified"):
        plan = get_method(name).schedule(24, 4, LENGTHS)
        assert {0, 23} <= set(plan.layers(plan.min_depth)), name
    for name in ("multi_exit", "calm"):
        assert get_method(name).schedule(24, 4, LENGTHS).layers(5) == (0, 1, 2, 3, 4)


def test_fitting_refuses_what_cannot_be() -> None:
    with pytest.raises(ScheduleError, match="1 to the number of layers"):
        fit(8, 9, LENGTHS)
    with pytest.raises(ScheduleError, match="no decode step"):
        fit(8, 2, [])


def test_a_batch_runs_until_its_longest_row_ends() -> None:
    assert batch_lengths([5, 9, 2, 1, 1], 2) == [8, 1, 1]


def test_fitted_depths_achieve_what_generation_reports(model: tuple[Any, Any]) -> None:
    """The prediction over a run's lengths is the ratio that the run's caches counted."""
    network, tokenizer = model
    ids = encode_prompts(tokenizer, TEXTS[:5])
    plan = Schedule.for_speedup(3, 8, horizon=6, decay="linear")
    result = generate_ids(network, tokenizer, ids, plan, 2, max_new_tokens=12, do_sample=False)
    assert Lengths(result.lengths).ratio(plan) == pytest.approx(result.stats.layer_ratio)


# --- reading a layer's states

#: Soft-capping that is no module; streams that are merged after the last layer.
MORE = ("gemma2", "gemma3n")
#: Inputs for each layer from one table; keys of layers that would be gone; layers of a kind that their place decides.
UNCUT = ("gemma3n", "gemma4", "gemma4-shared", "jamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_a_layer_out_is_the_model_cut_there(family: Any) -> None:
    """The exit at depth d gives the logits of the model that has only its d bottom layers."""
    network = build(family)
    ids = torch.randint(2, 100, (2, 7))
    with torch.no_grad():
        states = network(ids, output_hidden_states=True).hidden_states
        if family in MORE:
            with pytest.raises(ValueError, match="does more than norm and LM head"):
                read_out(network)
            return
        reader = read_out(network)
        for depth in (1, 3, 7):
            if family in UNCUT and family != "jamba":  # its bottom layers stay in their places
                with pytest.raises(UnsupportedModel, match="cannot be cut to layers 0"):
                    prune(network, range(depth))
                continue
            cut = prune(network, range(depth))
            assert len(decoder_layers(cut)) == depth
            torch.testing.assert_close(reader(states[depth]), cut(ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_is_skipping_in_the_prompt_too(family: Any) -> None:
    network = skipdecode.attach(build(family))
    ids = torch.randint(2, 100, (2, 7))
    layers = (0, 3, 6, 7)
    if family in UNCUT:
        with pytest.raises(UnsupportedModel, match="cannot be cut to layers 0, 3, 6, 7"):
            prune(network, layers)
        return
    order = (*layers, *(i for i in range(8) if i not in layers))
    with torch.no_grad(), teacher_forced(network, Schedule(8, 4, 4, 1, decay="constant", order=order), 0):
        expected = network(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(prune(network, layers)(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_small_model_from_scratch_has_the_form_alone(model: tuple[Any, Any]) -> None:
    network, _ = model
    small = get_method("scratch").prepare(network, 4)
    pruned = get_method("static").prepare(network, 4)
    assert len(decoder_layers(small)) == len(decoder_layers(pruned)) == 2
    ours, theirs = small.state_dict(), pruned.state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    name = "model.decoder.layers.0.fc1.weight"
    assert not torch.equal(ours[name], theirs[name])
    assert get_method("scratch").prepare(small, 1) is small  # trained on


def test_static_pruning_leaves_the_layers_that_skipdecode_runs(model: tuple[Any, Any]) -> None:
    """By default too, where one bottom layer is never skipped."""
    network, _ = model
    for layers in ({}, {"warmup": 2}, {"order": "even"}):
        asked: dict[str, Any] = {"warmup": 1, **layers}
        kept = Schedule.for_speedup(2, 8, 9, decay="constant", **asked).layers(4)
        ours = get_method("static").prepare(network, 2, **layers).state_dict()
        theirs = prune(network, kept).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_static_pruning_leaves_the_layers_that_are_asked_for(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Those that SkipDecode would run with this order and warm-up; other options of schedules are refused."""
    words = ["train", checkpoint, "--data", data, "--method", "static", "--speedup", 2, "--max-steps", 1]
    words += ["--eval-steps", 0, "--learning-rate", 1e-12, "--weight-decay", 0, "--warmup-layers", 2]
    done = run(*words, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    whole, small = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "out"))
    for place, layer in enumerate((0, 1, 6, 7)):
        name = "model.decoder.layers.{}.fc1.weight"
        torch.testing.assert_close(small[name.format(place)], whole[name.format(layer)])
    other = run(*words[:-1], 1, "--output", tmp_path / "out")
    assert other.returncode == 2
    assert "layers" in other.stderr
    refused = run(*words, "--decay", "linear", "--output", tmp_path / "bad")
    assert refused.returncode == 2
    assert "do not go with static" in refused.stderr


# --- CALM


def decode(model: tuple[Any, Any], tokenizer: PreTrainedTokenizerBase, plan: Any) -> Any:
    ids = encode_prompts(tokenizer, TEXTS[:4])
    return generate_ids(model, tokenizer, ids, plan, 4, max_new_tokens=10, do_sample=False, eos_token_id=-1)


def test_nobody_confident_is_the_full_model(model: tuple[Any, Any]) -> None:
    network, tokenizer = model
    stock = decode(network, tokenizer, None)
    calm = decode(network, tokenizer, Calm().decoder(network, 1.2, 10))
    assert [row.text for row in calm.completions] == [row.text for row in stock.completions]
    assert calm.stats.average_depth == calm.stats.row_depth == 8
    assert [row.text for row in decode(network, tokenizer, None).completions] == [row.text for row in stock.completions]


def test_everybody_confident_leaves_at_the_first_layer_and_writes_all_caches(model: tuple[Any, Any]) -> None:
    network, tokenizer = model
    maker = Calm().decoder(network, -1.0, 10)
    caches: list[Any] = []

    def keep(cache: Any) -> Any:
        caches.append(cache)
        return cache

    result = decode(network, tokenizer, lambda m: keep(maker(m)))
    assert result.stats.average_depth == result.stats.row_depth == 1
    lengths = {layer.keys.shape[2] for layer in caches[0].layers}
    assert len(lengths) == 1
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[0].layers)
    assert result.stats.peak_kv_bytes == held  # the layers that only wrote count too


def test_a_batch_runs_at_least_what_its_rows_do_and_rows_do_not_depend_on_it(model: tuple[Any, Any]) -> None:
    network, tokenizer = model
    ids = encode_prompts(tokenizer, TEXTS[:4])
    with torch.no_grad():  # as sure of its random tokens as a trained model is of its own
        network.model.decoder.final_layer_norm.weight.mul_(60)
    maker = Calm().decoder(network, 0.5, 10)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1}
    together = generate_ids(network, tokenizer, ids, maker, 4, **options)
    alone = generate_ids(network, tokenizer, ids, maker, 1, **options)
    assert [row.text for row in together.completions] == [row.text for row in alone.completions]
    assert 1 < together.stats.row_depth < together.stats.average_depth <= 8
    assert alone.stats.row_depth == alone.stats.average_depth == pytest.approx(together.stats.row_depth)


def test_rows_end_where_generation_ends_them(model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """B16: with another end-of-sequence, a row that has met it holds no batch up, and one that has not does."""
    network, tokenizer = model
    ids = encode_prompts(tokenizer, TEXTS[:4])
    free: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1}
    generated = network.generate(
        **tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt"),
        **free,
        pad_token_id=tokenizer.pad_token_id,
    )
    ends = generated[0, -10:].tolist()
    others = [row[-10:].tolist() for row in generated[1:]]
    end = next((t for t in ends if any(t not in row for row in others)), ends[0])
    maker = Calm().decoder
    caches: list[Any] = []

    def kept(make: Any, subject: Any) -> Any:
        caches.append(make(subject))
        return caches[-1]

    for eos, stops in ((end, [end]), (None, []), ([end, 1], [end, 1])):
        monkeypatch.setattr(network.generation_config, "eos_token_id", eos)
        make = maker(network, 1.2, 10)
        result = generate_ids(network, tokenizer, ids, partial(kept, make), 4, max_new_tokens=10, do_sample=False)
        assert sorted(caches[-1].stops) == sorted(stops)
        # The first token is the prompt's; each later one is a step of its row.
        assert caches[-1].row_steps == sum(row.tokens - 1 for row in result.completions)


def test_detach_leaves_nothing_of_calm(checkpoint: Path) -> None:
    """Its exits stand in the gates: with them they go, and no hook stays."""

    def state(network: Any) -> Any:
        return {name: dict(vars(module)) for name, module in network.named_modules()}

    network, tokenizer = skipdecode.load(str(checkpoint))
    skipdecode.detach(network)
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in network.modules()]
    before = state(network)
    assert decode(network, tokenizer, Calm().decoder(network, -1.0, 10)).stats.average_depth == 1
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in network.modules()] == hooks
    assert state(skipdecode.detach(network)) == before


@pytest.mark.parametrize("speedup", [1.5, 3.0, 6.0])
def test_a_threshold_stands_for_a_budget(
    model: tuple[Any, Any], speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nine thresholds, the one at which held-out tokens come nearest to the target; each is tried on the texts."""
    network, _ = model
    monkeypatch.setattr(network.generation_config, "eos_token_id", 5)
    tried = []

    def decode(maker: Any) -> Any:
        nines = -math.log10(1 - maker.keywords["threshold"])
        tried.append(maker.keywords["threshold"])
        return GenerationStats(8, row_layers=round(1000 * min(8, 1 + nines * 1.5)), row_steps=1000)

    maker: Any
    maker, notes = get_method("calm").decoding(network, speedup, lambda: [7, 12, 9], decode)
    assert len(tried) == 9
    assert maker.keywords["threshold"] == notes["threshold"]
    assert notes["threshold_horizon"] == maker.keywords["horizon"] == 12
    assert maker.keywords["stops"] == [5]
    assert notes["held_out_token_ratio"] == pytest.approx(speedup, rel=0.02)


def test_recurrent_layers_are_refused_with_a_reason() -> None:
    """G: a state that a token skips is lost to the next; said at once, not by an AttributeError."""
    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
    )
    with pytest.raises(ModelError, match="recurrent layers"):
        Calm().decoder(Qwen3NextForCausalLM(config), 0.5, 10)


@pytest.mark.parametrize("name", FITTED)
def test_no_lengths_are_refused(name: str) -> None:
    """B6: one line of ours, not max() of an empty list."""
    for lengths in ([], [0, 0]):
        with pytest.raises(ScheduleError, match="no decode step"):
            get_method(name).schedule(8, 2, lengths)


# --- objectives


def outputs_of(network: Any, **more: Any) -> Any:
    ids = torch.randint(2, 100, (2, 12))
    labels = torch.cat([torch.full((2, 1), -100), torch.randint(2, 100, (2, 5))], 1)
    labels[1, -2:] = -100
    return network(ids, **more), labels, {"input_ids": ids, "labels": labels}


def test_multi_exit_averages_the_losses_of_the_models_cut_there(model: tuple[Any, Any]) -> None:
    network, _ = model
    plans = {k: get_method("multi_exit").schedule(8, k, [12]) for k in (2.0, 4.0)}
    objective = get_method("multi_exit").objective(network, plans)
    assert objective is not None
    depths = range(1, 9)
    outputs, labels, inputs = outputs_of(network, output_hidden_states=True)
    parts = [Objective()(prune(network, range(d))(inputs["input_ids"]), labels) for d in depths]
    torch.testing.assert_close(objective(outputs, labels), torch.stack(parts).mean())


def test_distillation_from_oneself_at_full_depth_adds_nothing_at_full_depth(model: tuple[Any, Any]) -> None:
    network, _ = model
    outputs, labels, inputs = outputs_of(network)
    plain = Objective()(outputs, labels)
    mine = Distillation(0.5)
    mine.prepare(network, inputs, Schedule.full(8))
    torch.testing.assert_close(mine(outputs, labels), plain)
    mine.prepare(network, inputs, Schedule.for_speedup(2, 8, 6, decay="linear"))
    # The outputs are the teacher's own here: the distance is 0, and half of the loss is left.
    torch.testing.assert_close(mine(outputs, labels), plain / 2, rtol=1e-4, atol=1e-5)


def test_distillation_pulls_towards_the_teacher(model: tuple[Any, Any], checkpoint: Path) -> None:
    network, _ = model
    teacher, _ = skipdecode.load(str(checkpoint))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    outputs, labels, inputs = outputs_of(network)
    objective = Distillation(1.0, teacher)
    objective.prepare(network, inputs, Schedule.full(8))
    loss = objective(outputs, labels)
    assert loss > 0
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert any(p.grad is not None for p in network.parameters())


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ValueError, match="known are full, skipdecode"):
        get_method("magic")
