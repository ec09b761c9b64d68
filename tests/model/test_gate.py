"""Exactness of gates, by a naive reference, on every family, with left-padded batches: see docs/how-it-works.md."""

from __future__ import annotations

import functools
from collections import UserDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    ZayaConfig,
)

from helpers.families import (
    DENSE,
    FAMILIES,
    FORMS,
    LAYERS,
    LENGTHS,
    NEW,
    SCHEDULES,
    STEPS,
    TOP,
    WIDTH,
    Probe,
    build,
    decode,
    distance,
    heads,
    naive,
    new_token_logits,
    prompts,
    reference_logits,
    row,
    run,
    uncached,
    window,
)
from skipdecode import Schedule, SkipCache, attach, teacher_forced
from skipdecode.errors import CacheError, UnsupportedModel
from skipdecode.model.cache import BLOCK_SIZE, PreallocatedLayer, total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import bind
from skipdecode.model.gate import PositionSlice, refuse_packed
from skipdecode.model.inspect import decoder_layers, gates_of

FULL = Schedule.full(LAYERS)


TOLERANCE = 1e-5  # fp32, relative to the logits' scale


#: Every family in any order and with decay in the prompt; one family of each form with all schedules.
PAIRS = [(name, "prompt-wide") for name in FAMILIES if name not in FORMS]
PAIRS += [(name, schedule) for name in FORMS for schedule in SCHEDULES]


def check_teacher_forced(model: PreTrainedModel, schedule: Schedule, mask: Tensor, output: Any) -> None:
    """Cached step-by-step logits are those of one uncached pass, and the reference's; not the full model's."""
    steps = torch.stack(output.logits, dim=1)
    assert steps.shape[1] == NEW
    assert distance(steps, new_token_logits(model, schedule, output.sequences, mask)) < TOLERANCE
    assert distance(steps, new_token_logits(model, FULL, output.sequences, mask)) > 0.01
    assert distance(steps, reference_logits(model, schedule, output.sequences, mask)) < TOLERANCE


@functools.cache
def stock_kv_bytes(name: str) -> list[list[int]]:
    """What the stock cache holds after each pass, per layer."""
    model = build(name)
    probe = Probe(DynamicCache(config=model.config))
    run(model, prompts(), **{CACHE: probe.cache}, logits_processor=LogitsProcessorList([probe]))
    return probe.measure_layer_kv


@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_decoding_is_teacher_forcing_and_the_cache_holds_what_will_still_run(name: str, schedule: str) -> None:
    """Invariants 1, 2 and 5 for all orders, decays and decay inside the prompt.

    After each pass, a layer of the next step holds what the stock cache would, and room; no other holds anything.
    """
    model, inputs, asked = attach(build(name)), prompts(), SCHEDULES[schedule]
    cache = SkipCache(model, asked)
    grows = [isinstance(layer, PreallocatedLayer) for layer in cache.layers]
    probe = Probe(cache)
    output = run(model, inputs, **{CACHE: cache}, logits_processor=LogitsProcessorList([probe]))
    held = [0] * LAYERS
    plan = cache.schedule  # lenders of keys may stand before their borrowers in it
    for number, stock in enumerate(stock_kv_bytes(name)):
        runs = range(LAYERS) if number == 0 else plan.layers(plan.depth(number - 1))
        keeps = plan.layers(plan.depth(number))
        for layer in runs:
            held[layer] = stock[layer] if layer in keeps else 0
            if grows[layer]:
                held[layer] = held[layer] // (WIDTH + number) * (WIDTH + BLOCK_SIZE)
        assert probe.measure_layer_kv[number] == held
    assert len(probe.measure_layer_kv) == number + 1 == NEW
    assert sum(held) == total_kv_bytes(cache)
    assert cache.get_seq_length() == WIDTH + STEPS
    assert cache.step_depths == [asked.depth(g) for g in range(STEPS)]
    check_teacher_forced(model, asked, inputs["attention_mask"], output)


@pytest.mark.parametrize(
    ("name", "lengths"), [*((name, (7, 7)) for name in FAMILIES), *((name, LENGTHS) for name in FORMS)], ids=str
)
def test_decoding_is_teacher_forcing_in_eager_attention(name: str, lengths: tuple[int, ...]) -> None:
    """Invariant 2 where SDPA, which the other tests run, is not used; and for equal lengths, without a mask."""
    model, inputs, schedule = build(name, "eager"), prompts(lengths), SCHEDULES["prompt"]
    check_teacher_forced(model, schedule, inputs["attention_mask"], run(model, inputs, schedule))


class Biased(LogitsProcessor):
    """A processor of one's own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.linspace(-2, 2, scores.shape[1]) * (input_ids[:, -1:] % 2)


HABITS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ends": {"eos_token_id": list(range(3, 128, 9)), "min_new_tokens": 3},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    "own processor": {"logits_processor": LogitsProcessorList([Biased()])},
    "samples": {"do_sample": True, "top_k": 9, "temperature": 2.0, "num_return_sequences": 3},
    "nucleus": {"do_sample": True, "top_p": 0.8, "renormalize_logits": True},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -1.0, "eos_token_id": list(range(3, 90, 9))},
    "sampled beams": {"num_beams": 2, "do_sample": True, "early_stopping": True},
}


@pytest.mark.parametrize("habit", HABITS)
def test_habits_are_those_of_a_naive_model(habit: str) -> None:
    """The same texts as a stock model without a cache whose skipped layers are undone in every pass."""
    model, inputs, plan = build("gemma3"), prompts(), SCHEDULES["prompt"]
    torch.manual_seed(3)
    ours = run(model, inputs, plan, **HABITS[habit])
    with naive(model, plan, WIDTH) as stock:
        torch.manual_seed(3)
        theirs = run(stock, inputs, use_cache=False, **HABITS[habit])
    assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_skips_too(dtype: torch.dtype) -> None:
    """Full depth is the stock model to the bit; skipping is the reference as nearly as the type allows."""
    model, inputs = build("llama").to(dtype), prompts()
    stock = run(model, inputs)
    full = run(model, inputs, Schedule.full(LAYERS))
    assert all(map(torch.equal, stock.logits, full.logits))
    found = run(model, inputs, TOP)
    expected = reference_logits(model, TOP, found.sequences, inputs["attention_mask"])
    assert distance(torch.stack(found.logits, 1).float(), expected.float()) < 8 * torch.finfo(dtype).eps


def loop(model: PreTrainedModel, inputs: dict[str, Tensor], cache: DynamicCache) -> list[Tensor]:
    """Greedy logits by a loop of one's own, embeddings instead of ids."""
    mask, logits = inputs["attention_mask"], []
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    for _ in range(NEW):
        where = (mask.cumsum(1) - 1).clamp(min=0)[:, -embeds.shape[1] :]
        with torch.no_grad():
            out = model(inputs_embeds=embeds, attention_mask=mask, position_ids=where, **{CACHE: cache})
        logits.append(out.logits[:, -1])
        embeds = model.get_input_embeddings()(logits[-1].argmax(-1, keepdim=True))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return logits


@pytest.mark.parametrize("name", ["opt", "gemma3"])
def test_a_loop_of_ones_own_skips_too(name: str) -> None:
    """Model(...) with a SkipCache and input embeddings gives generate's logits."""
    model, inputs = attach(build(name)), prompts()
    expected = run(model, inputs, TOP)
    logits = loop(model, inputs, SkipCache(model, TOP))
    assert distance(torch.stack(logits, 1), torch.stack(expected.logits, 1)) < 1e-5


def test_the_form_of_layers_is_not_learnt_from_who_ran_before() -> None:
    """GPT-Neo's layers return tuples; here its first layers have no position in the very first pass."""
    plan = Schedule(LAYERS, 2, 1, 8, prompt_decay=12, order=(6, 3, 7, 5, 1, 4, 2, 0))
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    for first in (
        run,
        lambda model, inputs, plan: uncached(model, plan, inputs["input_ids"], inputs["attention_mask"]),
    ):
        model = attach(build("gpt-neo"))
        state = torch.random.get_rng_state()
        first(model, inputs, plan)
        assert torch.equal(torch.random.get_rng_state(), state), "learning the form draws no random numbers"
        output = run(model, inputs, plan)
        expected = reference_logits(model, plan, output.sequences, inputs["attention_mask"])
        assert distance(torch.stack(output.logits, 1), expected) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    """Each padded row's greedy tokens are those of the row alone without padding; its logits too, in fp32."""
    model, inputs, schedule = build(name), prompts(), SCHEDULES["prompt"]
    together = run(model, inputs, schedule)
    for index in (1, 2):
        alone = run(model, row(inputs, index), schedule)
        assert together.sequences[index, WIDTH:].tolist() == alone.sequences[0, LENGTHS[index] :].tolist()
        assert distance(torch.stack(together.logits)[:, index], torch.stack(alone.logits)[:, 0]) < 10 * TOLERANCE


def layer_flops(model: PreTrainedModel, layer: int, batch: int, queries: int, keys: int) -> int:
    """Multiply-adds of one layer's matrix products, times two: projections and MLP, scores and weighted values."""
    weights = [getattr(module, "weight", None) for module in decoder_layers(model)[layer].modules()]
    count, _, size = heads(model)
    return (
        2
        * batch
        * queries
        * (sum(w.numel() for w in weights if isinstance(w, Tensor) and w.ndim == 2) + 2 * count * size * keys)
    )


class Flops(TorchDispatchMode):
    """Counts as torch's FlopCounterMode does, per decoder layer; that one follows every module, at many times the cost.

    Attributes:
        total: of all that runs, backward passes too.
        layers: of each decoder layer's forward passes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.total = 0
        self.layers = [0] * LAYERS
        self.running: int | None = None

    def enter(self, index: int | None, *_: Any) -> None:
        """Called before (with its number) and after a layer's forward pass."""
        self.running = index

    def __enter__(self) -> Flops:
        self.hooks = []
        for index, layer in enumerate(decoder_layers(self.model)):
            self.hooks += [layer.register_forward_pre_hook(functools.partial(self.enter, index))]
            self.hooks += [layer.register_forward_hook(functools.partial(self.enter, None))]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        if func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs or {}, out_val=output)
            self.total += flops
            if self.running is not None:
                self.layers[self.running] += flops
        return output


#: Each depth of the other, for one step.
STEEP = TOP.replace(horizon=5)


def decode_flops(model: PreTrainedModel, cache: Any) -> list[int]:
    """Counted FLOPs of each pass."""
    passes, flops = decode(model, prompts(), cache, STEEP.horizon + 1), []
    for _ in range(STEEP.horizon + 2):
        with Flops(model) as counter:
            next(passes)
        flops.append(counter.total)
    return flops


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_a_decode_step_saves_exactly_the_skipped_layers(name: str) -> None:
    """FLOPs are affine in depth: a step costs the stock model's less its skipped layers; the prompt the same."""
    model = attach(build(name, "eager"))
    caches = (DynamicCache(config=model.config), SkipCache(model, STEEP))
    stock, skipping = (decode_flops(model, cache) for cache in caches)
    assert stock[0] == skipping[0]
    for step in range(STEEP.horizon + 1):
        skipped = set(range(LAYERS)) - set(STEEP.layers(STEEP.depth(step)))
        length = WIDTH + step + 1
        saved = sum(layer_flops(model, i, len(LENGTHS), 1, min(length, window(model, i) or length)) for i in skipped)
        assert stock[step + 1] - skipping[step + 1] == saved > 0


@pytest.mark.parametrize("name", FORMS)
def test_a_pass_costs_each_layer_the_positions_it_runs(name: str) -> None:
    """Forward: each layer costs what it costs in a stock pass over just its own positions, counted, not computed."""
    model, length = build(name, "eager"), 18
    mask = prompts()["attention_mask"]
    sequences = torch.randint(2, 128, (len(mask), length))

    def flops(plan: Schedule, width: int = length) -> list[int]:
        with torch.no_grad(), Flops(model) as counter:
            uncached(model, plan, sequences[:, :width], mask)
        return counter.layers

    attach(model)
    plan = bind(SCHEDULES["prompt"], model.config)
    counts = plan.positions_per_layer(WIDTH, length)
    assert sum(counts) < LAYERS * length
    alone = {width: flops(FULL, width) for width in {*counts} if width > WIDTH}
    alone[WIDTH] = flops(FULL, WIDTH)
    for layer, (count, ran) in enumerate(zip(counts, flops(plan), strict=True)):
        if count >= WIDTH:
            assert ran == alone[count][layer]
        else:
            assert ran < alone[WIDTH][layer]


def test_a_skipped_layer_passes_its_first_argument_on() -> None:
    """Hidden states come first or by their name; what a layer returns beside them is learnt without the cache."""
    model = attach(build("gpt2"))
    cache, hidden = SkipCache(model, TOP), torch.randn(3, 1, 32)
    model(**prompts(), **{CACHE: cache})
    cache.begin_layer(0, 1)
    layer = decoder_layers(model)[1]
    assert cache.begin_layer(1, 1) == 0
    for values, named in (
        ((hidden, cache), {}),
        ((hidden,), {CACHE: cache}),
        ((), {"hidden_states": hidden, CACHE: cache}),
    ):
        gates_of(model).values = None
        assert layer(*values, **named) is hidden
        assert gates_of(model).values == 0


def test_a_layer_that_is_given_too_few_positions_is_refused() -> None:
    """Only layers that borrow their keys can do without the positions that a model has dropped."""
    model = attach(build("llama"))
    with teacher_forced(model, TOP, 4):
        plan = gates_of(model).forced
        plan.begin_layer(0, 9)
        with pytest.raises(CacheError, match="layer 3 gets 4 of 9 positions"):
            decoder_layers(model)[3](torch.zeros(2, 4, 32))


def test_hidden_states_are_passed_on_in_the_layers_own_form() -> None:
    """A tensor, or a tuple as long as the one that a layer returned."""
    gates, hidden = gates_of(attach(build("llama"))), torch.zeros(2, 5, 8)
    gates.learn_output((hidden, 1, 2))
    assert gates.like_output(hidden) == (hidden, None, None)
    gates.learn_output(hidden)
    assert gates.like_output(hidden) is hidden


#: The last 4 of 9 positions, of which a layer runs 3: it sees the keys of the 5 before them as well.
LAST = PositionSlice(4, 3, 9)
#: The first 4 of 9.
FIRST = PositionSlice(9, 4, 9)


@pytest.mark.parametrize(
    ("part", "name", "shape", "dtype", "expected"),
    [
        (LAST, "hidden_states", (2, 4, 32), torch.float32, (2, 3, 32)),
        (LAST, "attention_mask", (2, 1, 4, 9), torch.float32, (2, 1, 3, 8)),
        (LAST, "attention_mask", (2, 9), torch.int64, (2, 8)),
        (LAST, "attention_mask", (2, 9), torch.float32, (2, 8)),
        (LAST, "attention_mask", (2, 7), torch.int64, (2, 7)),
        (LAST, "alibi", (8, 1, 9), torch.float32, (8, 1, 8)),
        (LAST, "position_bias", (1, 8, 4, 9), torch.float32, (1, 8, 3, 8)),
        (LAST, "position_ids", (2, 9), torch.int64, (2, 8)),
        (LAST, "position_ids", (3, 2, 4), torch.int64, (3, 2, 3)),
        (LAST, "position_ids", (3, 2, 5), torch.int64, (3, 2, 5)),
        (LAST, "position_embeddings", (4, 16), torch.float32, (3, 16)),
        (LAST, "position_embeddings", (1, 4, 8), torch.float32, (1, 3, 8)),
        (LAST, "scale", (), torch.float32, ()),
        (LAST, "slopes", (4,), torch.float32, (4,)),
        (LAST, "scales", (2, 4), torch.float32, (2, 3)),
        (LAST, "frequencies", (4, 9), torch.complex64, (3, 9)),
        (LAST, "frequencies", (4, 9), torch.float32, (3, 9)),
        (LAST, "per_layer_input", (2, 4, 4, 8), torch.float32, (2, 3, 4, 8)),
        (LAST, "per_layer_input", (2, 4, 5, 8), torch.float32, (2, 3, 5, 8)),
        (FIRST, "attention_mask", (2, 1, 9, 9), torch.float32, (2, 1, 4, 4)),
        (FIRST, "attention_mask", (2, 1, 1, 9), torch.bool, (2, 1, 1, 4)),
        (FIRST, "attention_mask", (2, 9), torch.int64, (2, 4)),
        (FIRST, "alibi", (8, 1, 9), torch.float32, (8, 1, 4)),
        (FIRST, "position_bias", (4, 1, 64), torch.float32, (4, 1, 64)),
        (FIRST, "position_ids", (2, 9), torch.int64, (2, 4)),
        (FIRST, "position_ids", (3, 9, 9), torch.int64, (3, 9, 4)),
        (FIRST, "position_embeddings", (1, 9, 8), torch.float32, (1, 4, 8)),
        (FIRST, "position_embeddings", (3, 2, 9, 9), torch.float32, (3, 2, 4, 9)),
        (FIRST, "position_embeddings", (2, 9, 8), torch.complex64, (2, 4, 8)),
        (FIRST, "per_layer_input", (9, 9, 9), torch.float32, (9, 4, 9)),
        (FIRST, "hidden_states", (3, 2, 9, 32), torch.float32, (3, 2, 4, 32)),
        (FIRST, "weights", (9, 32, 8, 16), torch.float32, (9, 32, 8, 16)),
        (FIRST, "cache_position", (9,), torch.int64, (4,)),
    ],
)
def test_a_prefix_is_cut_where_the_positions_are(
    part: PositionSlice, name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: tuple[int, ...]
) -> None:
    """By name and shape. Where a model drops positions, queries and keys have widths of their own."""
    given = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    (), cut = part.of_call(lambda **kwargs: None, (), {name: given})
    assert tuple(cut[name].shape) == expected
    assert torch.equal(cut[name], given[tuple(slice(0, size) for size in expected)]), "the first ones, of every axis"


def test_arguments_by_position_are_cut_by_their_names() -> None:
    """Tuples, lists and dicts inside too; what is no tensor passes."""

    def forward(hidden_states: Any, mask: Any = None, *more: Any) -> None: ...

    x, mask = torch.zeros(2, 4, 8), torch.zeros(2, 9)
    args, kwargs = PositionSlice(4, 3, 9).of_call(
        forward, (x, mask, [x, "text"]), {"pair": (x, x), "by": {"mask": x}, "n": 4}
    )
    assert [tuple(args[0].shape), tuple(args[1].shape), tuple(args[2][0].shape)] == [(2, 3, 8), (2, 8), (2, 3, 8)]
    assert type(args[2]) is list
    assert type(kwargs["pair"]) is tuple
    assert [tuple(y.shape) for y in kwargs["pair"]] == [(2, 3, 8)] * 2
    assert tuple(kwargs["by"]["mask"].shape) == (2, 3, 8)
    assert (args[2][1], kwargs["n"]) == ("text", 4)
    with pytest.raises(CacheError, match="does not show its 9 positions"):
        PositionSlice(4, 3, 9).of_call(forward, (x, torch.zeros(2, 1, 5, 9)), {})


def test_streams_beside_hidden_states_are_left_whole() -> None:
    """Where hidden states have their positions on another axis, what has no streams keeps its own."""
    given = {"hidden_states": torch.zeros(4, 4, 4, 8), "position_embeddings": torch.zeros(2, 4, 4)}
    (), cut = PositionSlice(4, 3, 9, hidden_axis=2).of_call(lambda **kwargs: None, (), given)
    assert tuple(cut["hidden_states"].shape) == (4, 4, 3, 8)
    assert tuple(cut["position_embeddings"].shape) == (2, 3, 4)


def test_lent_keys_are_read_as_a_prefix_and_written_whole() -> None:
    """Lenders write through to what all layers share; moving it to a device or dtype moves the original."""
    shared: UserDict[int, tuple[torch.Tensor, ...]] = UserDict()
    (), cut = PositionSlice(4, 3, 9).of_call(lambda **kwargs: None, (), {"shared_kv_states": shared})
    cut["shared_kv_states"][0] = (torch.zeros(2, 1, 9, 8), torch.zeros(2, 1, 9, 8))
    assert [tuple(x.shape) for x in shared[0]] == [(2, 1, 9, 8)] * 2
    moved = cut["shared_kv_states"].to(torch.float16)
    assert [tuple(x.shape) for x in moved[0]] == [(2, 1, 8, 8)] * 2
    assert {x.dtype for x in shared[0]} == {torch.float16}


def packed(kwargs: dict[str, Any]) -> bool:
    """Whether a pass with these arguments is refused."""
    try:
        refuse_packed(kwargs)
    except CacheError:
        return True
    return False


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_row_is_packed_if_it_holds_several_texts_of_two_tokens(
    texts: list[int], left: int, right: int, beside: bool
) -> None:
    """Padding is zeros at either end; one packed row among others is enough."""
    row = [0] * left + [i for text in texts for i in range(text)] + [0] * right
    rows = [[*range(len(row))], row] if beside else [row]
    assert packed({"position_ids": torch.tensor(rows)}) == (sum(text > 1 for text in texts) > 1)


def test_packing_is_told_by_lengths_too() -> None:
    """An argument that is None says nothing; nor do positions in sections."""
    assert packed({"cu_seq_lens_q": torch.tensor([0, 4])})
    assert not packed({"cu_seq_lens_q": None, "position_ids": None})
    assert not packed({})
    assert not packed({"position_ids": torch.tensor([[[0], [1], [0], [1]]])})
    assert packed({"position_ids": torch.tensor([[3, 0, 1, 0, 1]])}), "the first text may begin before the row"


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_packed_positions_are_refused(name: str) -> None:
    """Position ids that restart within a row: several sequences in one."""
    model, length = attach(build(name)), 10
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]] * 2)
    ids = torch.randint(2, 128, (2, length))
    with teacher_forced(model, TOP, 4), pytest.raises(ValueError, match=r"packed.*one sequence per row"):
        model(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match=r"packed.*one sequence per row"):
        model(ids, position_ids=packed, **{CACHE: SkipCache(model, TOP)})
    model(ids, position_ids=packed, use_cache=False)  # the gates alone refuse nothing


def test_a_model_that_gives_no_layer_the_cache_is_noticed() -> None:
    """Full depth would run, and a schedule be reported."""
    model = attach(build("llama"))

    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, CACHE: None}

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(CacheError, match="no layer was given the SkipCache"):
        run(model, prompts(), TOP)


def test_a_pass_that_drops_the_cache_is_noticed() -> None:
    """Gradient checkpointing in training mode drops caches: full depth would run, and step_depths claim depths."""
    model = attach(build("llama")).train()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    with pytest.raises(CacheError, match=r"SkipCache.*model\.eval"):
        model(**prompts(), **{CACHE: SkipCache(model, TOP)})
    assert run(model.eval(), prompts(), TOP)[CACHE].step_depths[0] == TOP.depth(0)


#: PEFT still asks by the old name.
peft_asks = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@peft_asks
def test_prefix_tuning_is_noticed() -> None:
    """PEFT's prefix tuning puts a cache of its own in our place."""
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(attach(build("llama")), config)
    cache = SkipCache(model.base_model, TOP)
    with pytest.raises(CacheError, match="dropped on the way"):
        model.generate(**prompts(), **{CACHE: cache}, max_new_tokens=3)


@peft_asks
def test_adapters_keep_the_guard_against_second_prompts() -> None:
    """Around an attached model, and attached again around it: twice is once."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(attach(build("llama")), peft.LoraConfig(target_modules="all-linear"))
    attach(attach(model))
    inputs = prompts()
    cache = SkipCache(model, TOP)
    output = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(output, run(build("llama"), inputs, TOP).sequences)  # fresh adapters change nothing
    for new in (2, WIDTH):
        with pytest.raises(CacheError, match="new SkipCache"):
            model.generate(**inputs, **{CACHE: cache}, max_new_tokens=new)


@pytest.mark.parametrize("forced", [False, True])
def test_a_state_that_layers_hand_on_is_refused(forced: bool) -> None:
    """Zaya's layers give the next one their router's state, which a skipped layer does not have."""
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": LAYERS, "layer_types": ["hybrid"] * LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = ZayaConfig(**sizes, **heads, moe_intermediate_size=32, num_experts=4, router_hidden_size=16)
    model, inputs = attach(AutoModelForCausalLM.from_config(config).eval()), prompts()
    held = teacher_forced(model, TOP, WIDTH) if forced else nullcontext()
    with held, pytest.raises(UnsupportedModel, match="hands the next one more than hidden states"):
        model(**inputs, use_cache=False) if forced else run(model, inputs, TOP)
