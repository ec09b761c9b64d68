"""A prompt that is kept, shared or gone on with: the same tokens as a call on the whole text, at every speed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from skipdecode.generation.kept_prompt import KeptPrompt
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from helpers.families import FAMILIES, LAYERS, SCHEDULES, TOP, build, decode, distance, prompts, run
from skipdecode import Schedule, SkipCache, attach
from skipdecode.errors import CacheError
from skipdecode.model.adapter import Adapter
from skipdecode.model.cache import RECURRENT
from skipdecode.model.cache_name import CACHE
from skipdecode.model.inspect import text_config

SPEEDS = {"top": TOP, "even": SCHEDULES["even"], "full": Schedule.full(LAYERS)}


def prefix_of(model: PreTrainedModel, inputs: dict[str, Tensor], length: int) -> DynamicCache:
    """The first columns of a batch, computed by the model as it is."""
    cache, mask = DynamicCache(config=model.config), inputs["attention_mask"][:, :length]
    start = {"input_ids": inputs["input_ids"][:, :length], "attention_mask": mask}
    next(decode(model, start, cache, 0))
    return cache


def recurrent(model: PreTrainedModel) -> bool:
    """Whether a layer holds a state that is no list of positions."""
    return any(isinstance(layer, RECURRENT) for layer in DynamicCache(config=model.config).layers)


@contextmanager
def widths(model: nn.Module) -> Iterator[list[int]]:
    """How many positions each pass over the decoder computes."""
    found: list[int] = []
    layer = next(each for each in model.modules() if isinstance(each, nn.Embedding))
    hook = layer.register_forward_hook(lambda module, args, output: found.append(output.shape[1]))
    try:
        yield found
    finally:
        hook.remove()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefix_serves_many_calls_at_any_speed(name: str) -> None:
    """What follows it is computed as without it, padding included; the prefix itself is not changed."""
    model, inputs = build(name), prompts()
    if recurrent(model):
        with pytest.raises(CacheError, match="recurrent"):
            SkipCache(attach(model), TOP, prefix=DynamicCache(config=model.config))
        return
    alone = {speed: run(model, inputs, schedule) for speed, schedule in SPEEDS.items()}
    for length in (1, 4, 8):
        prefix = prefix_of(model, inputs, length)
        for speed, schedule in SPEEDS.items():
            with widths(model) as seen:
                after = run(model, inputs, **{CACHE: SkipCache(model, schedule, prefix=prefix)})
            assert seen[0] == inputs["input_ids"].shape[1] - length
            for a, b in zip(after.logits, alone[speed].logits, strict=True):
                assert distance(a, b) < 1e-4
            assert prefix.get_seq_length() == length


def test_memory_counts_what_the_prefix_holds() -> None:
    """The peak is that of a call without it, or what all layers hold of the prefix."""
    model, inputs = attach(build("llama")), prompts()
    prefix = prefix_of(model, inputs, 8)
    caches = [SkipCache(model, TOP), SkipCache(model, TOP, prefix=prefix)]
    for cache in caches:
        run(model, inputs, **{CACHE: cache})
    assert caches[0].step_depths == caches[1].step_depths
    held = sum(layer.keys.numel() * 2 * 4 for layer in prefix.layers)
    assert SkipCache(model, TOP, prefix=prefix).peak_kv_bytes == held
    assert caches[1].peak_kv_bytes >= held


def test_what_is_no_prefix_is_refused() -> None:
    """Of a schedule whose prompts skip layers, of another model, with nothing in it, or with layers retired."""
    model, inputs = attach(build("llama")), prompts()
    prefix = prefix_of(model, inputs, 4)
    for schedule in ("prompt", "prompt-wide"):
        with pytest.raises(CacheError, match="in the prompt"):
            SkipCache(model, SCHEDULES[schedule], prefix=prefix)
    used = SkipCache(model, TOP)
    run(model, inputs, **{CACHE: used})
    other = build("llama").config
    other.num_hidden_layers = 4
    for wrong in (used, DynamicCache(config=model.config), DynamicCache(config=other)):
        with pytest.raises(CacheError, match="prefix"):
            SkipCache(model, TOP, prefix=wrong)


def test_rows_are_not_made_up() -> None:
    """A prefix of one row is none for three, padded otherwise; repeated for beams, it is."""
    model, inputs = attach(build("llama")), prompts()
    alone = {name: value[:1] for name, value in inputs.items()}
    prefix = prefix_of(model, alone, 4)
    with pytest.raises(CacheError, match="1 rows"):
        run(model, inputs, **{CACHE: SkipCache(model, TOP, prefix=prefix)})
    expected = run(model, alone, TOP, num_beams=2).sequences
    prefix.batch_repeat_interleave(2)
    cache = SkipCache(model, TOP, prefix=prefix)
    assert run(model, alone, **{CACHE: cache}, num_beams=2).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("more", [0, 1])
def test_a_prefix_leaves_a_token_to_compute(more: int) -> None:
    """Else the prompt would be computed again, behind itself."""
    model, inputs = attach(build("llama")), prompts()
    prefix = prefix_of(model, inputs, inputs["input_ids"].shape[1])
    shorter = {name: value[:, : value.shape[1] - more] for name, value in inputs.items()}
    with pytest.raises(CacheError, match="holds the whole prompt"):
        run(model, shorter, **{CACHE: SkipCache(model, TOP, prefix=prefix)})


def test_a_full_skip_cache_may_be_the_prefix() -> None:
    """Calls that begin with it share no spare room: the second text is the first."""
    model, inputs = attach(build("llama")), prompts()
    prefix = SkipCache(model, Schedule.full(LAYERS))
    next(decode(model, {name: value[:, :4] for name, value in inputs.items()}, prefix, 0))
    caches = [SkipCache(model, TOP, prefix=prefix) for _ in range(2)]
    first, second = (run(model, inputs, **{CACHE: cache}).sequences for cache in caches)
    assert first.tolist() == second.tolist() == run(model, inputs, TOP).sequences.tolist()


@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "adapter"])
@pytest.mark.parametrize("name", sorted({"llama", "opt", "gemma3", "qwen3.5"} & set(FAMILIES)))
def test_turns_of_a_conversation_are_fresh_calls(name: str, adapted: bool) -> None:
    """Ten turns at changing speeds, one that takes the last answer back, one that begins anew: token for token."""
    schedules = {2.0: Schedule(LAYERS, 4, 4, horizon=1, decay="constant"), 4.0: Schedule(LAYERS, 3, 1, horizon=6)}
    model = attach(build(name))
    if adapted:
        adapter = Adapter(text_config(model.config).hidden_size, 4, schedules)
        for weight in adapter.parameters():
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(weight.numel()))
        attach(model, adapter=adapter)
    source, kept = random.Random(0), KeptPrompt(model)
    ids: list[int] = []
    computed, whole = 0, 0
    for turn in range(10):
        if turn == 6:
            ids = ids[:-2]
        if turn == 8:
            ids = []
        ids = ids + source.choices(range(2, 128), k=source.randint(1, 4) + (turn == 8))
        schedule = source.choice([*schedules.values(), Schedule.full(LAYERS)])
        asked = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        with widths(model) as seen:
            cache = kept.cache(ids, schedule)
            told = run(model, asked, **{CACHE: cache}, max_new_tokens=3).sequences
        fresh = run(model, asked, schedule, max_new_tokens=3).sequences
        assert told.tolist() == fresh.tolist()
        computed, whole = computed + sum(seen), whole + len(ids) + 2
        ids = told[0].tolist()
    assert computed == whole if recurrent(model) else computed < 0.7 * whole


def test_prompts_that_skip_layers_are_computed_anew() -> None:
    """Silently right: nothing of them can be kept."""
    model, schedule = build("llama"), SCHEDULES["prompt"]
    kept = KeptPrompt(model)
    for length in (5, 9):
        asked = {name: value[:1, :length] for name, value in prompts().items()}
        told = run(model, asked, **{CACHE: kept.cache(asked["input_ids"][0].tolist(), schedule)})
        assert told.sequences.tolist() == run(model, asked, schedule).sequences.tolist()


def test_a_pass_that_is_cut_short_is_forgotten() -> None:
    """As Ctrl-C cuts one: the next call begins with nothing half computed."""
    model, ids = build("llama"), prompts()["input_ids"][0].tolist()
    kept = KeptPrompt(model)
    kept.cache(ids[:4], TOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.layers[3].mlp, "forward", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            kept.cache(ids, TOP)
    asked = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    told = run(model, asked, **{CACHE: kept.cache(ids, TOP)}).sequences
    assert told.tolist() == run(model, asked, TOP).sequences.tolist()
