"""The cache, pass by pass: what it holds, what it answers, and that no text goes deeper again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer

from helpers.families import (
    FAMILIES,
    FORMS,
    LAYERS,
    NEW,
    SCHEDULES,
    SHARED,
    STEPS,
    TOP,
    WIDTH,
    build,
    decode,
    distance,
    positions,
    prompts,
    row,
    run,
    same,
)
from skipdecode import Schedule, SkipCache, attach, detach
from skipdecode.errors import CacheError
from skipdecode.model.cache import BLOCK_SIZE, RECURRENT, PreallocatedLayer, layer_kv_bytes, total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.inspect import kv_shared_layers

FULL = Schedule.full(LAYERS)


@pytest.fixture
def model() -> PreTrainedModel:
    """Any attached model."""
    return attach(build("llama"))


WHOLE = Schedule(LAYERS, LAYERS, 2, horizon=6)  # its first step runs all layers


def _pass(cache: SkipCache, width: int) -> list[int]:
    """One pass of three rows, whose layers store zeros; returns how many positions each layer ran."""
    ran = []
    for index, layer in enumerate(cache.layers):
        count = cache.begin_layer(index, width)
        ran.append(count)
        if count and isinstance(layer, DynamicLayer):
            cache.update(torch.zeros(3, 2, count, 8), torch.zeros(3, 2, count, 8), index)
        elif count and isinstance(layer, RECURRENT):
            cache.update_conv_state(torch.zeros(3, 4, 4), index)
        if count:
            cache.end_layer(index)
    return ran


@pytest.mark.parametrize("name", sorted({"opt", "gemma3", "qwen3.5", "gemma4-shared"} & set(FAMILIES)))
@pytest.mark.parametrize("schedule", ["prompt-wide", "full"])
def test_lengths_are_those_of_the_stock_cache(name: str, schedule: str) -> None:
    """After each pass: positions seen, the mask's size of every layer that still runs, and whether there is a state."""
    plan = FULL if schedule == "full" else SCHEDULES[schedule]
    model = attach(build(name))
    cache, stock = SkipCache(model, plan), DynamicCache(config=model.config)
    passes = zip(decode(model, prompts(), cache, STEPS), decode(model, prompts(), stock, STEPS), strict=True)
    for number, _ in passes:
        assert cache.passes == number + 1
        assert len(cache.step_depths) == number
        assert cache.has_previous_state()
        keeps = cache.schedule.layers(cache.schedule.depth(number))
        for layer in range(LAYERS):
            assert cache.get_seq_length(layer) == WIDTH + number
            attends = layer in keeps and isinstance(stock.layers[layer], DynamicLayer)
            expected = stock.get_mask_sizes(1, layer) if attends else (WIDTH + number + 1, 0)
            assert cache.get_mask_sizes(1, layer) == expected
            assert (layer_kv_bytes(cache.layers[layer]) > 0) == (
                layer in keeps and layer_kv_bytes(stock.layers[layer]) > 0
            )


class Watch(TorchDispatchMode):
    """Measures after every operation how much memory the tensors occupy that can be reached from a cache."""

    def __init__(self, cache: SkipCache) -> None:
        super().__init__()
        self.cache = cache
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        reached: list[Any] = [vars(layer) for layer in self.cache.layers]
        storages = {}
        while reached:
            value = reached.pop()
            reached += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if isinstance(value, Tensor) and value.ndim > 1:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(storages.values()))
        return output


@pytest.mark.parametrize("name", [name for name in ("opt", "gpt-neo", "qwen3.5") if name in FAMILIES])
@pytest.mark.parametrize("schedule", ["top", "prompt-wide"])
def test_the_peak_of_bytes_is_that_of_memory(name: str, schedule: str) -> None:
    """Watched from outside, operation by operation: a layer that is retired when it has run counts while it runs."""
    model = attach(build(name))
    cache = SkipCache(model, SCHEDULES[schedule])
    with Watch(cache) as watch:
        for _ in decode(model, prompts(), cache, 10):
            pass
    assert cache.peak_kv_bytes == watch.peak


@pytest.mark.parametrize("name", [name for name in SHARED if name in FAMILIES])
def test_lenders_of_keys_run_as_long_as_their_borrowers(name: str) -> None:
    """Whatever the order: the depths are those asked for, and no layer runs without the one whose keys it reads."""
    model = attach(build(name))
    borrowed = kv_shared_layers(model.config)
    assert borrowed == {4: 2, 5: 3, 6: 2, 7: 3}
    for schedule in SCHEDULES.values():
        plan = SkipCache(model, schedule).schedule
        for step in range(schedule.horizon + 1):
            running = plan.layers(schedule.depth(step))
            assert plan.depth(step) == schedule.depth(step)
            assert all(borrowed[layer] in running for layer in running if layer in borrowed)


def test_a_state_is_known_of_after_its_layer_is_retired() -> None:
    """Before the prompt no layer has one, after it each has: transformers asks layers that no longer hold it, too."""
    cache = SkipCache(attach(build("qwen3.5")), TOP)
    recurrent = [index for index, layer in enumerate(cache.layers) if isinstance(layer, RECURRENT)]
    assert not any(cache.has_previous_state(index) for index in recurrent)
    _pass(cache, 5)
    retired = set(range(LAYERS)) - set(TOP.layers(TOP.depth(0)))
    assert retired & {*recurrent}
    assert {*recurrent} - retired
    assert all(cache.has_previous_state(index) is True for index in recurrent)


def test_a_cache_without_its_gates_is_refused_at_the_first_key() -> None:
    """Gates taken off after the cache was made: no layer may store what no schedule asked for."""
    model = attach(build("llama"))
    cache = SkipCache(model, TOP)
    detach(model)
    with pytest.raises(CacheError, match=r"layer 0 ran though the schedule skips it.*attach"):
        model(**prompts(), **{CACHE: cache})


@pytest.mark.parametrize("stored", [0, 3, 5, 6])
def test_a_layer_must_store_the_positions_that_it_runs(stored: int) -> None:
    """Fewer, or more, and it is said at once, when the layer has run: of five positions, all five."""
    cache = SkipCache(attach(build("opt")), TOP)
    keys = torch.zeros(2, 4, stored, 8)
    assert cache.begin_layer(0, 5) == 5
    if stored:
        cache.update(keys, keys, 0)
    if stored == 5:
        cache.end_layer(0)
        assert cache.peak_kv_bytes == 2 * 2 * 4 * (5 + BLOCK_SIZE) * 8 * 4
    else:
        with pytest.raises(CacheError, match="layer 0 ran without asking the SkipCache"):
            cache.end_layer(0)


@pytest.mark.parametrize("name", FORMS)
def test_a_second_turn_on_the_same_cache_is_refused(name: str) -> None:
    """New text after the answer would need the layers that were retired."""
    model, inputs = build(name), prompts()
    first = run(model, inputs, TOP)
    turn = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(turn), NEW + 3, dtype=torch.long)], dim=1)
    with pytest.raises(RuntimeError, match="new SkipCache"):
        model.generate(turn, attention_mask=mask, **{CACHE: first[CACHE]}, max_new_tokens=2)


def test_the_full_schedule_allows_a_second_turn() -> None:
    """Nothing is retired, so the cache goes on like an ordinary one."""
    model, inputs = attach(build("gemma3")), prompts()
    turns = []
    for cache in (SkipCache(model, FULL), DynamicCache(config=model.config)):
        first = run(model, inputs, **{CACHE: cache})
        turn = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(turn), NEW + 3, dtype=torch.long)], dim=1)
        turns.append(run(model, {"input_ids": turn, "attention_mask": mask}, **{CACHE: cache}))
    assert same(*turns)


@pytest.mark.parametrize("width", [0, 2, 5])
def test_only_one_column_may_follow_the_prompt(model: PreTrainedModel, width: int) -> None:
    """In loops written by hand too."""
    cache, inputs = SkipCache(model, TOP), prompts((6, 6))
    model(inputs["input_ids"], **{CACHE: cache})
    with pytest.raises(RuntimeError, match=f"{width} new positions.*retired.*new SkipCache"):
        model(inputs["input_ids"][:, :width], **{CACHE: cache})


@pytest.mark.parametrize("chunk", [1, WIDTH - 1])
def test_chunked_prefill_is_refused(chunk: int) -> None:
    """Chunks hide where the prompt ends; a last chunk of one column would pass for a step."""
    with pytest.raises(RuntimeError, match="a chunk of one"):
        run(build("gemma3"), prompts(), TOP, prefill_chunk_size=chunk)


def test_chunked_prefill_in_the_generation_config_is_refused(model: PreTrainedModel) -> None:
    """Said before the prompt is run; the full schedule does not mind."""
    model.generation_config.prefill_chunk_size = 4
    with pytest.raises(ValueError, match="prefill_chunk_size to None"):
        SkipCache(model, TOP)
    SkipCache(model, FULL)


@pytest.mark.parametrize("kind", ["assistant", "prompt-lookup"])
def test_assisted_decoding_is_refused(model: PreTrainedModel, kind: str) -> None:
    """Verification rolls the cache back; with the full schedule it may, and gives the greedy tokens."""
    options = {"assistant_model": build("llama")} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    inputs: dict[str, Any] = row(prompts(), 0)
    with pytest.raises(ValueError, match="crop"):
        run(model, inputs, TOP, **options)
    assisted = run(model, inputs, FULL, **options)
    assert torch.equal(assisted.sequences, run(model, inputs).sequences)


def test_a_recurrent_state_takes_no_second_prompt() -> None:
    """One such layer among others is enough, though no layer is retired; where nothing is ever skipped, it may."""
    model, deep = attach(build("qwen3.5")), SCHEDULES["top-to-1"]
    cache = SkipCache(model, deep)
    cache.begin_prompt()
    assert _pass(cache, 5) == [5] * LAYERS
    with pytest.raises(CacheError, match=r"a prompt, or a chunk of one.*recurrent"):
        cache.begin_prompt()
    cache = SkipCache(model, FULL)
    for _ in range(2):
        cache.begin_prompt()
        _pass(cache, 5)
    assert cache.get_seq_length() == 10


def test_only_the_full_schedules_cache_can_be_cropped(model: PreTrainedModel) -> None:
    """Nothing is retired, so a position may be rolled back, as from a stock cache."""
    caches = [SkipCache(model, FULL), DynamicCache(config=model.config)]
    for cache in caches:
        model(**prompts(), **{CACHE: cache})
        cache.crop(-2)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == WIDTH - 2
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert caches[0].is_croppable, "generate asks before it plans to roll a step back"
    skipping = SkipCache(model, TOP)
    assert not skipping.is_croppable
    with pytest.raises(CacheError, match="cannot be cropped"):
        skipping.crop(-1)


@pytest.mark.parametrize("name", ["opt", "gemma3"])
@pytest.mark.parametrize("read", [[WIDTH - 1], [1, 5]], ids=str)
def test_a_prompt_may_come_in_parts_while_no_layer_is_retired(name: str, read: list[int]) -> None:
    """Of any width, one position too: logits are those of the prompt read at once, and depths begin behind it."""
    model, inputs = attach(build(name)), prompts()
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], SkipCache(model, WHOLE)
    for start, end in pairwise([0, *read]):
        known = {"attention_mask": mask[:, :end], CACHE: cache}
        part = model.prepare_inputs_for_generation(ids[:, start:end], is_first_iteration=True, **known)
        part |= {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, start:end]}
        with torch.no_grad():
            model(**part)
    parts, whole = run(model, inputs, **{CACHE: cache}), run(model, inputs, WHOLE)
    assert torch.equal(parts.sequences, whole.sequences)
    assert distance(torch.stack(parts.logits, 1), torch.stack(whole.logits, 1)) < 1e-5
    assert cache.step_depths == whole[CACHE].step_depths


def test_a_second_turn_may_come_while_no_layer_is_retired(model: PreTrainedModel) -> None:
    """What was written at full depth is prompt to what follows; afterwards, layers are retired and it is refused."""
    plan, inputs = Schedule.from_depths(LAYERS, [LAYERS] * 4 + [3]), prompts()
    cache = SkipCache(model, plan)
    first = run(model, inputs, **{CACHE: cache}, max_new_tokens=3).sequences
    turn = torch.cat([first, first[:, :4]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(turn[:, :7])], dim=1)
    inputs = {"input_ids": turn, "attention_mask": mask}
    again = run(model, inputs, **{CACHE: cache})
    assert torch.equal(again.sequences, run(model, inputs, plan).sequences)
    assert cache.step_depths == [8, 8] + [plan.depth(step) for step in range(NEW - 1)]
    with pytest.raises(CacheError, match="retired"):
        run(model, inputs, **{CACHE: cache})


@pytest.mark.parametrize(
    ("name", "plan"),
    [("jamba", WHOLE), ("llama", WHOLE.replace(max_depth=7)), ("llama", TOP.replace(prompt_decay=3))],
    ids=["recurrent", "retired", "decay-in-the-prompt"],
)
def test_a_prompt_in_parts_is_refused_where_it_is_not_exact(name: str, plan: Schedule) -> None:
    """States that transformers does not go on from, layers that are gone."""
    model, inputs = attach(build(name)), prompts((6, 6))
    cache = SkipCache(model, plan)
    model(inputs["input_ids"][:, :4], **{CACHE: cache})
    with pytest.raises(CacheError, match=r"retired or recurrent.*new SkipCache"):
        model(inputs["input_ids"][:, 4:], **{CACHE: cache})


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "gemma4-shared"])
def test_a_copied_cache_belongs_to_the_same_model(name: str) -> None:
    """And holds what the copied one held."""
    if name not in FAMILIES:
        pytest.skip("this transformers does not say which layers share keys")
    model, inputs = attach(build(name)), prompts()
    cache = SkipCache(model, TOP)
    steps = decode(model, inputs, cache, 8)
    for _ in range(4):
        next(steps)
    twin = copy.deepcopy(cache)
    assert total_kv_bytes(twin) == total_kv_bytes(cache) > 0
    ids = torch.full((3, 1), 5)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
    logits = [model(ids, attention_mask=mask, **{CACHE: each}).logits for each in (twin, cache)]
    assert torch.equal(*logits)


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


@pytest.mark.parametrize("name", FORMS)
def test_a_prefix_serves_many_calls_at_any_speed(name: str) -> None:
    """What follows it is computed as without it, padding included; the prefix itself is not changed."""
    model, inputs = build(name), prompts()
    if recurrent(model):
        with pytest.raises(CacheError, match="recurrent"):
            SkipCache(attach(model), TOP, prefix=DynamicCache(config=model.config))
        return
    prefix = prefix_of(model, inputs, 4)
    for schedule in (TOP, FULL):
        alone = run(model, inputs, schedule, max_new_tokens=5)
        with widths(model) as seen:
            after = run(model, inputs, **{CACHE: SkipCache(model, schedule, prefix=prefix)}, max_new_tokens=5)
        assert seen[0] == WIDTH - 4
        assert distance(torch.stack(after.logits), torch.stack(alone.logits)) < 1e-4
        assert prefix.get_seq_length() == 4


def test_memory_counts_what_the_prefix_holds() -> None:
    """The peak is at least what all layers hold of the prefix."""
    model, inputs = attach(build("llama")), prompts()
    prefix = prefix_of(model, inputs, 8)
    cache = SkipCache(model, TOP, prefix=prefix)
    assert cache.peak_kv_bytes == sum(layer.keys.numel() * 2 * 4 for layer in prefix.layers)
    run(model, inputs, **{CACHE: cache})
    assert cache.step_depths == [TOP.depth(step) for step in range(STEPS)]


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


def _stored(layer: DynamicLayer, start: int, count: int) -> None:
    states = torch.arange(start, start + count, dtype=torch.float32)[None, None, :, None].expand(3, 2, count, 4)
    layer.update(states, states + 0.5)


def test_keys_are_copied_only_when_the_room_is_full() -> None:
    """Bit for bit transformers' own layer at every length; the memory moves once in BLOCK_SIZE steps."""
    ours, theirs = PreallocatedLayer(), DynamicLayer()
    places = set()
    for number in range(3 * BLOCK_SIZE):
        for layer in (ours, theirs):
            _stored(layer, 5 + number if number else 0, 1 if number else 5)
        assert ours.get_seq_length() == theirs.get_seq_length() == 5 + number
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert layer_kv_bytes(ours) == ours.keys.untyped_storage().nbytes() + ours.values.untyped_storage().nbytes()
        places.add(ours.keys.data_ptr())
    assert len(places) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.reorder_cache(torch.tensor([2, 2, 0])),
        lambda layer: layer.batch_select_indices(torch.tensor([1])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.crop(-2),
        lambda layer: setattr(layer, "keys", layer.keys + 1),
        lambda layer: layer.reset(),
    ],
    ids=["reorder", "select", "repeat", "crop", "replaced", "reset"],
)
def test_what_replaces_keys_leaves_the_room(change: Any) -> None:
    """Rows by beams, rows chosen, positions rolled back: what transformers' own layer holds, and no room beside it."""
    ours, theirs = PreallocatedLayer(), DynamicLayer()
    for layer in (ours, theirs):
        _stored(layer, 0, 5)
        change(layer)
        before = None if layer.keys is None else layer.keys.clone()
        rows = 3 if layer.keys is None else len(layer.keys)
        states = torch.full((rows, 2, 1, 4), 9.0)
        kept = layer.keys
        layer.update(states, states)
        assert before is None or torch.equal(kept, before), "what was handed out before is not written to"
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


def test_a_copy_of_keys_writes_to_room_of_its_own() -> None:
    """deepcopy, and then both go on."""
    ours = PreallocatedLayer()
    _stored(ours, 0, 5)
    twin = copy.deepcopy(ours)
    _stored(ours, 5, 1)
    _stored(twin, 50, 1)
    assert ours.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert twin.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 50]


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_through_keys_or_values_alone_is_kept(which: int) -> None:
    """As where only one of the two projections is trained."""
    weight, other = torch.ones(3, 2, 2, 4, requires_grad=True), torch.ones(3, 2, 2, 4)
    ours = PreallocatedLayer()
    used = torch.zeros(())
    for _ in range(2):
        keys, values = ours.update(*((weight, other) if which == 0 else (other, weight)))
        used = used + (keys * values).sum()
    used.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))


def test_a_prefix_of_fewer_rows_does_not_spread_over_all() -> None:
    """Their prompts begin otherwise, and are padded otherwise."""
    model, inputs = attach(build("llama")), prompts()
    prefix = prefix_of(model, {name: value[:1] for name, value in inputs.items()}, 4)
    with pytest.raises(RuntimeError):
        run(model, inputs, **{CACHE: SkipCache(model, TOP, prefix=prefix)})
