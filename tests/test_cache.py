"""The cache and the gates' shared state by themselves: what they answer, pass by pass, and what they refuse."""

from __future__ import annotations

import copy
import threading
from collections import UserDict
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from helpers.families import FAMILIES, LAYERS, LENGTHS, SCHEDULES, STEPS, TOP, WIDTH, build, decode, prompts, run
from skipdecode import Schedule, SkipCache, attach, detach, teacher_forced
from skipdecode.errors import CacheError, UnsupportedModel, UntrainedWarning
from skipdecode.model import config as checkpoint_config
from skipdecode.model.attach import TeacherForcedPass
from skipdecode.model.cache import BLOCK_SIZE, RECURRENT, PreallocatedLayer, layer_kv_bytes, total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import CONFIG_KEY
from skipdecode.model.gate import Gates, _shape
from skipdecode.model.inspect import decoder_layers

FULL = Schedule.full(LAYERS)


def test_the_schedule_in_the_config_runs_where_none_is_given() -> None:
    """The fastest one; one that is given goes first."""
    model = attach(build("opt"))
    setattr(model.config, CONFIG_KEY, {"schedules": {"2": SCHEDULES["bottom"].to_dict(), "3": TOP.to_dict()}})
    assert SkipCache(model).schedule == TOP
    assert SkipCache(model, SCHEDULES["even"]).schedule == SCHEDULES["even"]


def test_a_new_cache_has_seen_and_holds_nothing() -> None:
    """Counters start at zero, and a model without gates has no cache at all."""
    with pytest.raises(CacheError, match="the model has no gates"):
        SkipCache(build("opt"), TOP)
    cache = SkipCache(attach(build("opt")), TOP)
    assert (cache.passes, cache.peak_kv_bytes, cache.get_seq_length()) == (0, 0, 0)
    assert cache.step_depths == []
    assert not cache.has_previous_state()


@pytest.mark.parametrize("name", sorted({"opt", "gemma3", "qwen3.5", "gemma4-shared"} & set(FAMILIES)))
@pytest.mark.parametrize("schedule", ["top", "prompt-wide", "full"])
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


def test_a_cache_without_its_gates_is_refused_at_the_first_key() -> None:
    """Gates taken off after the cache was made: no layer may store what no schedule asked for."""
    model = attach(build("llama"))
    cache = SkipCache(model, TOP)
    detach(model)
    with pytest.raises(CacheError, match=r"layer 0 ran though the schedule skips it.*attach"):
        model(**prompts(), **{CACHE: cache})


def test_the_full_schedules_cache_can_be_cropped() -> None:
    """Nothing is retired, so a position may be rolled back, as from a stock cache."""
    model = attach(build("llama"))
    caches = [SkipCache(model, FULL), DynamicCache(config=model.config)]
    for cache in caches:
        model(**prompts(), **{CACHE: cache})
        cache.crop(-2)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == WIDTH - 2
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_bytes_count_every_tensor_of_two_axes_or_more() -> None:
    """Keys and values, states by name; not the bookkeeping."""

    class Layer:
        def __init__(self) -> None:
            self.keys = torch.zeros(2, 3, 5)  # 120 bytes
            self.states = {"conv": torch.zeros(2, 7, dtype=torch.float16), "none": None}  # 28 bytes
            self.seen = torch.zeros(9)
            self.name = "full"

    assert layer_kv_bytes(Layer()) == 148


# --- the cache by itself, driven as the gates drive it


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


def test_a_cache_says_who_was_not_trained() -> None:
    """The warning names the caller's line, not one of ours; attach warns as the cache does."""
    model = build("llama")
    for make in (attach, SkipCache):
        checkpoint_config._warn.cache_clear()
        with pytest.warns(UntrainedWarning, match="not trained to skip") as found:
            make(model, TOP)
        assert found[0].filename == __file__


def test_a_recurrent_state_takes_no_second_prompt() -> None:
    """One such layer among others is enough, though no layer is retired; where nothing is ever skipped, it may."""
    model, deep = attach(build("qwen3.5")), SCHEDULES["top-to-1"]
    cache = SkipCache(model, deep)
    cache.begin_prompt()
    assert _pass(cache, 5) == [5] * LAYERS
    with pytest.raises(CacheError, match=r"a prompt, or a chunk of one.*recurrent state"):
        cache.begin_prompt()
    cache = SkipCache(model, FULL)
    for _ in range(2):
        cache.begin_prompt()
        _pass(cache, 5)
    assert cache.get_seq_length() == 10


def test_the_full_schedules_passes_after_the_first_are_steps() -> None:
    """Of any width, as assisted decoding verifies several positions at once."""
    cache = SkipCache(attach(build("opt")), FULL)
    for width in (5, 1, 3):
        assert _pass(cache, width) == [width] * LAYERS
    assert (cache.passes, cache.step_depths) == (3, [LAYERS] * 2)


def test_who_runs_next_is_known_in_the_middle_of_a_pass() -> None:
    """What offloading fetches: the rest of this pass in network order, then the next step's layers."""
    cache = SkipCache(attach(build("opt")), TOP)
    after = [sorted(TOP.layers(TOP.depth(step))) for step in range(2)]
    begun = copy.deepcopy(cache)
    begun.begin_layer(0, 5)
    _pass(cache, 5)
    cache.begin_layer(0, 1)
    for layer in range(LAYERS):
        assert begun.upcoming(layer) == [*range(layer + 1, LAYERS), *after[0]]
        assert cache.upcoming(layer) == [each for each in after[0] if each > layer] + after[1]


def test_the_peak_is_what_was_held_at_once() -> None:
    """Six layers that stay and, after them, one at a time that is retired as soon as it has run."""
    cache, width = SkipCache(attach(build("llama")), Schedule.from_depths(LAYERS, [6, 2], order="bottom", warmup=0)), 5
    each = 2 * 3 * 2 * (width + BLOCK_SIZE) * 8 * 4  # keys and values of one layer
    for running in (LAYERS, 6, 2):
        _pass(cache, width if running == LAYERS else 1)
        assert cache.peak_kv_bytes == each * 7
    assert cache.step_depths == [6, 2]
    assert total_kv_bytes(cache) == each * 2


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


@pytest.mark.skipif("gemma4-shared" not in FAMILIES, reason="the release of transformers lacks it")
def test_a_layer_that_borrows_its_keys_stores_none() -> None:
    """It has run as it should."""
    cache = SkipCache(attach(build("gemma4-shared")), FULL)
    assert _pass(cache, 5) == [5] * LAYERS
    assert layer_kv_bytes(cache.layers[-1]) == 0


# --- the gates' shared state


@pytest.mark.parametrize(
    ("hidden", "shape", "axis"),
    [
        ((2, 5, 8), None, 1),
        ((2, 5, 8), (2, 5), 1),
        ((3, 2, 5, 8), (2, 5), 2),  # streams before, as Gemma 3n's
        ((2, 5, 3, 8), (2, 5), 1),  # streams after, as DeepSeek-V4's
    ],
)
def test_positions_are_found_by_the_shape_of_the_ids(
    hidden: tuple[int, ...], shape: tuple[int, ...] | None, axis: int
) -> None:
    """The axis after the batch's."""
    gates = Gates({})
    assert gates.axis(torch.zeros(hidden), shape) == axis
    if len(hidden) > 3:
        assert gates.axis(torch.zeros(2, 2, 2, 8), (2, 2)) == axis, "what cannot be told from one pass is remembered"


@pytest.mark.parametrize("shape", [None, (2, 2), (4, 5)])
def test_positions_that_cannot_be_told_are_refused(shape: tuple[int, ...] | None) -> None:
    """Two axes fit, or none."""
    with pytest.raises(CacheError, match="do not show where their positions are"):
        Gates({}).axis(torch.zeros(2, 2, 2, 8), shape)


def test_hidden_states_are_passed_on_in_the_layers_own_form() -> None:
    """A tensor, or a tuple as long as the one that a layer returned."""
    gates, hidden = Gates({}), torch.zeros(2, 5, 8)
    assert not gates.output_is_known
    gates.learn_output((hidden, 1, 2))
    assert gates.output_is_known
    assert gates.like_output(hidden) == (hidden, None, None)
    gates.learn_output(hidden)
    assert gates.like_output(hidden) is hidden


def test_a_teacher_answers_for_the_width_of_the_pass() -> None:
    """Upper layers that are given fewer positions ask about the pass's own width; layer 0 begins the next pass."""
    teacher = TeacherForcedPass(TOP, 4)
    for width in (9, 12, 6):
        expected = TOP.positions_per_layer(4, width)
        assert [teacher.begin_layer(0, width)] + [
            teacher.begin_layer(layer, 3) for layer in range(1, LAYERS)
        ] == expected
        assert teacher.width == width
    for layer, count in enumerate(TOP.positions_per_layer(4, 20)):
        again = TeacherForcedPass(TOP, 4)
        again.begin_layer(0, 6)
        assert again.begin_layer(layer, 20) == count, "recomputation starts in the middle"


def test_teachers_may_stand_within_each_other() -> None:
    """The inner one's schedule runs inside, the outer one's again after it, and none after that."""
    model = attach(build("opt"))
    ids = torch.randint(2, 128, (len(LENGTHS), WIDTH + 6))

    def logits(**options: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options).logits

    plain = logits()
    outer, inner = SCHEDULES["bottom"], SCHEDULES["even"]
    alone = {}
    for plan in (outer, inner):
        with teacher_forced(model, plan, WIDTH):
            alone[plan] = logits()
    with teacher_forced(model, outer, WIDTH):
        with teacher_forced(model, inner, WIDTH):
            assert torch.equal(logits(), alone[inner])
        assert torch.equal(logits(), alone[outer])
    assert torch.equal(logits(), plain)
    assert not torch.equal(alone[outer], alone[inner])


def test_two_threads_cannot_recompute_one_models_layers() -> None:
    """The backward pass has threads of its own: with two teachers there is no telling whose layers it recomputes."""
    model = attach(build("llama")).train()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with teacher_forced(model, TOP, WIDTH):
            inside.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert inside.wait(60)
        gates = model.forward.gates

        class Ask(torch.autograd.Function):
            """Asks who teaches, in the backward pass, of a thread without a teacher."""

            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
                found.append(gates.forced)
                return grads[0]

        found: list[Any] = []
        assert gates.forced is None
        Ask.apply(torch.zeros(2, requires_grad=True)).sum().backward()
        assert [teacher.schedule for teacher in found] == [TOP]
        with teacher_forced(model, SCHEDULES["even"], WIDTH):
            Ask.apply(torch.zeros(2, requires_grad=True)).sum().backward()
        assert found[-1].schedule == SCHEDULES["even"], "one's own comes first"
        gates.forced[-1] = found[0]
        with pytest.raises(CacheError, match="several threads train one model"):
            Ask.apply(torch.zeros(2, requires_grad=True)).sum().backward()
        del gates.forced[-1]
    finally:
        done.set()
        holder.join()
    Ask.apply(torch.zeros(2, requires_grad=True)).sum().backward()
    assert found[-1] is None
    assert gates.forced == {}


# --- one gate, called as a model calls its layer


def test_a_skipped_layer_passes_its_first_argument_on() -> None:
    """Hidden states come first or by their name; what stands behind them is not looked at."""
    model = attach(build("llama"))
    cache, hidden = SkipCache(model, TOP), torch.randn(3, 1, 32)
    _pass(cache, 5)
    cache.begin_layer(0, 1)
    layer = decoder_layers(model)[1]
    assert cache.begin_layer(1, 1) == 0
    model.forward.gates.learn_output(hidden)
    assert layer(hidden, None, torch.zeros(2), **{CACHE: cache}) is hidden
    assert layer(hidden_states=hidden, **{CACHE: cache}) is hidden


def test_what_a_skipped_layer_returns_is_learned_without_the_cache() -> None:
    """Given by place or by name: a position that the schedule skips leaves nothing in it."""
    model = attach(build("gpt2"))
    cache, hidden = SkipCache(model, TOP), torch.randn(3, 1, 32)
    _pass(cache, 5)
    cache.begin_layer(0, 1)
    for given, named in (((cache,), {}), ((), {CACHE: cache})):
        model.forward.gates.output_is_known = False
        assert torch.equal(decoder_layers(model)[1](hidden, *given, **named), hidden)
        assert model.forward.gates.output_is_known


def test_a_layer_fills_no_cache_in_a_teacher_forced_pass() -> None:
    """Whatever else it is given."""
    model = attach(build("llama"))
    cache, hidden = DynamicCache(config=model.config), torch.zeros(2, 6, 32)
    with teacher_forced(model, TOP, 4):
        for given, named in (((cache,), {}), ((), {CACHE: cache})):
            with pytest.raises(CacheError, match="a teacher-forced pass can fill no cache"):
                decoder_layers(model)[0](hidden, *given, **named)


@pytest.mark.parametrize("name", sorted({"opt", "gemma4-shared"} & set(FAMILIES)))
def test_a_dict_that_is_empty_or_of_announced_lenders_is_no_reason_to_refuse(name: str) -> None:
    """The next release of transformers may hand one to every family."""
    model = attach(build(name))

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "lent": UserDict() if name == "opt" else UserDict(states=1)}

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(give, with_kwargs=True)
    cache = SkipCache(model, TOP)
    with torch.no_grad():
        model(**prompts((3,)), **{CACHE: cache})
    assert cache.passes == 1


# --- what a layer may store


@pytest.mark.parametrize("name", ["opt", "qwen3.5"])
def test_a_skipped_layer_may_store_nothing(name: str) -> None:
    """Keys and values, states of convolutions and recurrences: refused, whoever calls."""
    model = attach(build(name))
    cache = SkipCache(model, TOP)
    state = torch.zeros(len(LENGTHS), 2, 1, 8)
    for number in decode(model, prompts(), cache, 3):
        running = TOP.layers(TOP.depth(number - 1)) if number else range(LAYERS)
        for layer in set(range(LAYERS)) - set(running):
            for store in (lambda i: cache.update(state, state, i), lambda i: cache.update_conv_state(state[0], i)):
                with pytest.raises(CacheError, match=f"layer {layer} ran though the schedule skips it"):
                    store(layer)
            with pytest.raises(CacheError, match=f"layer {layer} ran though the schedule skips it"):
                cache.update_recurrent_state(state, layer)


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


@pytest.mark.parametrize("name", ["opt", "gemma3", "qwen3.5"])
def test_the_full_schedules_cache_rolls_back_as_far_as_the_stock_one(name: str) -> None:
    """What transformers can undo for this model, and what it records to do so."""
    model = attach(build(name))
    cache, stock = SkipCache(model, FULL), DynamicCache(config=model.config)
    assert cache.is_croppable == stock.is_croppable
    for each in (cache, stock):
        each.activate_past_recording()
    assert [_plain(layer) for layer in cache.layers] == [_plain(layer) for layer in stock.layers]


def _plain(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, (bool, int, str))}


# --- what a layer is given


def test_a_layer_that_is_given_too_few_positions_is_refused() -> None:
    """Only layers that borrow their keys can do without the positions that a model has dropped."""
    model = attach(build("llama"))
    with teacher_forced(model, TOP, 4):
        plan = model.forward.gates.forced
        plan.begin_layer(0, 9)
        with pytest.raises(CacheError, match="layer 3 is given 4 of 9 positions: it cannot skip"):
            decoder_layers(model)[3](torch.zeros(2, 4, 32))


@pytest.mark.parametrize("lent", [{}, {"states": 1}], ids=["empty", "lent"])
def test_layers_that_lend_unannounced_are_refused(lent: dict[str, int]) -> None:
    """The config names no lenders, but something is handed from layer to layer: what skipping does to it is unknown."""
    model = attach(build("llama"))

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "shared": UserDict(lent)}

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(give, with_kwargs=True)
    if lent:
        with pytest.raises(UnsupportedModel, match="lend each other states"):
            run(model, prompts(), TOP)
    else:
        assert torch.equal(run(model, prompts(), TOP).sequences, run(build("llama"), prompts(), TOP).sequences)


def test_a_model_that_gives_no_layer_the_cache_is_noticed() -> None:
    """Full depth would run, and a schedule be reported."""
    model = attach(build("llama"))

    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, CACHE: None}

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(CacheError, match="no layer was given the SkipCache"):
        run(model, prompts(), TOP)


def test_the_shape_of_a_pass_is_that_of_its_ids_or_embeddings() -> None:
    """(batch, positions), by name or first in place; a mask that comes second is not taken for them."""
    ids, embeddings = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, 8)
    for args, kwargs in (((ids,), {}), ((), {"input_ids": ids}), ((), {"inputs_embeds": embeddings})):
        assert _shape(args, kwargs) == (2, 5)
    assert _shape((None,), {"inputs_embeds": embeddings, "input_ids": None}) == (2, 5)
    assert _shape((None, ids), {"attention_mask": ids}) is None


# --- keys and values with room ahead


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


def test_gradients_and_inference_tensors_are_not_written_over() -> None:
    """With gradients keys are concatenated; room made in inference mode is left outside of it."""
    ours = PreallocatedLayer()
    weight = torch.ones(3, 2, 2, 4, requires_grad=True)
    for _ in range(3):
        keys, _ = ours.update(weight * weight, weight * weight)
    keys.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 6.0))
    ours = PreallocatedLayer()
    with torch.inference_mode():
        _stored(ours, 0, 5)
        _stored(ours, 5, 1)
    _stored(ours, 6, 1)
    assert ours.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_room_is_used_up_before_more_is_made() -> None:
    """To its last position, step by step or at once; in inference mode too."""
    for mode in (False, True):
        with torch.inference_mode(mode):
            ours = PreallocatedLayer()
            _stored(ours, 0, 5)
            place = ours.keys.data_ptr(), ours.values.data_ptr()
            for start, count in ((5, 1), (6, BLOCK_SIZE - 1)):
                _stored(ours, start, count)
                assert (ours.keys.data_ptr(), ours.values.data_ptr()) == place
            _stored(ours, 5 + BLOCK_SIZE, 1)
            assert ours.keys.data_ptr() != place[0]
            assert ours.keys[0, 0, :, 0].tolist() == list(range(6 + BLOCK_SIZE))


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


def test_keys_and_values_keep_the_precision_they_come_in() -> None:
    """As in transformers' own layer; what comes later in a finer one is not rounded to the room's."""
    fine = torch.full((3, 2, 1, 4), 1 / 3)
    for first, second in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        ours, theirs = PreallocatedLayer(), DynamicLayer()
        for layer in (ours, theirs):
            layer.update(fine.to(first), fine.to(second))
            layer.update(fine.to(first), fine.to(second))
        for mine, stock in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert mine.dtype == stock.dtype
            assert torch.equal(mine, stock)
    ours = PreallocatedLayer()
    ours.update(fine.bfloat16(), fine.bfloat16())
    keys, values = ours.update(fine, fine)
    assert torch.equal(keys[:, :, 1:], fine)
    assert torch.equal(values[:, :, 1:], fine)
    assert torch.equal(keys[:, :, :1], fine.bfloat16().float())
