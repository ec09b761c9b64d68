"""Section 4 of the method, on tiny random models of every family, with unevenly left-padded batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, set_seed
from transformers.generation import BaseStreamer

from helpers.families import (
    ATTENTIONS,
    DENSE,
    EAGER_ONLY,
    FAMILIES,
    FORMS,
    LAYERS,
    LENGTHS,
    NEW,
    SCHEDULES,
    SHARED,
    STEPS,
    TOP,
    WIDTH,
    Probe,
    build,
    decode,
    distance,
    heads,
    new_token_logits,
    prompts,
    reference_logits,
    row,
    run,
    uncached,
    window,
)
from skipdecode import Schedule, SkipCache, attach, detach, teacher_forced
from skipdecode.model.cache import BLOCK_SIZE, PreallocatedLayer, total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import bind
from skipdecode.model.gate import Gate
from skipdecode.model.inspect import decoder_layers, gates_of, kv_shared_layers

FULL = Schedule.full(LAYERS)
TOLERANCE = 1e-5  # fp32, relative to the logits' scale
#: What schedules may ask of a family: any order down to one layer, decay in the prompt.
ORDERS = ("permutation", "prompt-wide")

every_family = pytest.mark.parametrize("name", FAMILIES)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def pairs(always: Iterable[str], forms: Iterable[str]) -> Any:
    """Every family with some of the schedules; one family of each form with more of them."""
    some = [(name, schedule) for name in FAMILIES for schedule in always]
    return pytest.mark.parametrize(("name", "schedule"), some + [(n, s) for n in FORMS if n in FAMILIES for s in forms])


# --- 2: incremental = teacher-forced


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


@pairs(ORDERS, [name for name in SCHEDULES if name not in ORDERS])
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


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EAGER_ONLY])
def test_decoding_is_teacher_forcing_in_eager_attention(name: str) -> None:
    """Invariant 2 where SDPA, which the other tests run, is not used."""
    model, inputs = build(name, "eager"), prompts()
    check_teacher_forced(model, TOP, inputs["attention_mask"], run(model, inputs, TOP))


@every_family
def test_decoding_is_teacher_forcing_without_padding(name: str) -> None:
    """Invariant 2 for a batch of equal lengths, whose mask ``generate`` drops."""
    model, inputs, schedule = build(name), prompts((7, 7)), SCHEDULES["prompt"]
    check_teacher_forced(model, schedule, inputs["attention_mask"], run(model, inputs, schedule))


# --- 3: inert


def same(a: Any, b: Any) -> bool:
    """Bit-identical tokens and logits."""
    return torch.equal(a.sequences, b.sequences) and all(map(torch.equal, a.logits, b.logits))


@pytest.mark.parametrize(("name", "attention"), ATTENTIONS)
def test_full_or_nothing_is_bit_identical(name: str, attention: str) -> None:
    """Gates without a cache, the full schedule, and a detached model all give the stock model's bits."""
    inputs = prompts()
    model = build(name, attention)
    few = functools.partial(run, model, inputs, max_new_tokens=4)
    stock = few()
    attach(model)
    assert same(few(), stock)
    assert same(few(FULL), stock)
    new_token_logits(model, TOP, few(TOP).sequences, inputs["attention_mask"])
    assert same(few(), stock), "a schedule must leave nothing behind"
    detach(model)
    assert same(few(), stock)


@every_family
def test_attach_and_detach_leave_the_model_as_found(name: str) -> None:
    """State-dict keys never change; after detach each module's attributes are the very objects they were."""
    model = build(name)
    keys = list(model.state_dict())
    modules = {key: dict(module.__dict__) for key, module in model.named_modules()}
    attach(model)
    assert gates_of(model)
    assert list(model.state_dict()) == keys
    gates = [layer.forward for layer in decoder_layers(model)]
    attach(model)
    assert [layer.forward for layer in decoder_layers(model)] == gates, "attaching twice must not gate twice"
    detach(detach(model))
    assert not gates_of(model)
    assert list(model.state_dict()) == keys
    for key, module in model.named_modules():
        assert module.__dict__.keys() == modules[key].keys()
        assert all(module.__dict__[name] is value for name, value in modules[key].items())


@pytest.mark.parametrize("name", ["opt", "gpt2", "gemma3"])
def test_a_forward_found_on_a_layer_is_kept(name: str) -> None:
    """An instance-level forward (as accelerate's hooks set) runs inside the gate, and is put back by detach."""
    model, calls = build(name), [0] * LAYERS

    def hook(index: int, forward: Any) -> Any:
        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[index] += 1
            return forward(*args, **kwargs)

        return counted

    for index, layer in enumerate(decoder_layers(model)):
        layer.forward = hook(index, layer.forward)
    found = [layer.__dict__["forward"] for layer in decoder_layers(model)]
    run(model, prompts(), TOP)
    steps = [TOP.layers(TOP.depth(g)) for g in range(STEPS)]
    assert calls == [1 + sum(index in layers for layers in steps) for index in range(LAYERS)]
    detach(model)
    assert all(layer.__dict__["forward"] is f for layer, f in zip(decoder_layers(model), found, strict=True))


@pytest.mark.parametrize("name", ["opt", "gpt2", "gemma3"])
def test_a_copy_is_independent(name: str) -> None:
    """The gates of a deep copy belong to the copy's layers and plan; the original does not feel it."""
    model, inputs = attach(build(name)), prompts()
    before, twin = run(model, inputs, TOP), copy.deepcopy(model)
    gates: list[Any] = [layer.forward for layer in decoder_layers(twin)]
    assert {type(gate) for gate in gates} == {Gate}
    assert all(g.original.__self__ is m for g, m in zip(gates, decoder_layers(twin), strict=True))
    with teacher_forced(model, TOP, 1):
        assert gates[0].gates.forced is None
    assert same(run(twin, inputs, TOP), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert same(run(model, inputs, TOP), before)
    detach(twin)
    assert gates_of(model)


# --- 4: batch = alone


@pairs(["prompt"], ["top"])
def test_a_row_does_not_depend_on_its_batch(name: str, schedule: str) -> None:
    """Each row's greedy tokens are those of the row alone without padding; its logits too, in fp32."""
    model, inputs = build(name), prompts()
    together = run(model, inputs, SCHEDULES[schedule])
    for index in range(len(LENGTHS)):
        alone = run(model, row(inputs, index), SCHEDULES[schedule])
        assert together.sequences[index, WIDTH:].tolist() == alone.sequences[0, LENGTHS[index] :].tolist()
        assert distance(torch.stack(together.logits)[:, index], torch.stack(alone.logits)[:, 0]) < 10 * TOLERANCE


@pytest.mark.parametrize("name", ["opt", "llama", "gemma3"])
def test_a_finished_row_does_not_disturb_the_others(name: str) -> None:
    """Rows that end early are padded; the rest of the batch goes on as if nothing had happened."""
    model, inputs = build(name), prompts()
    free = run(model, inputs, TOP).sequences[:, WIDTH:].tolist()
    end = free[1][4]
    stopped = run(model, inputs, TOP, eos_token_id=end).sequences[:, WIDTH:].tolist()
    assert end in stopped[1]
    for tokens, expected in zip(stopped, free, strict=True):
        length = expected.index(end) + 1 if end in expected else len(tokens)
        assert tokens[:length] == expected[:length]
        assert set(tokens[length:]) <= {0}


# --- 1 and 5: what the cache holds (see also above)


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
@pytest.mark.parametrize("schedule", ["top", "bottom", "constant", "prompt-wide"])
def test_the_peak_of_bytes_is_that_of_memory(name: str, schedule: str) -> None:
    """Watched from outside, operation by operation: a layer that is retired when it has run counts while it runs."""
    model = attach(build(name))
    cache = SkipCache(model, SCHEDULES[schedule])
    with Watch(cache) as watch:
        for _ in decode(model, prompts(), cache, 10):
            pass
    assert cache.peak_kv_bytes == watch.peak


@pytest.mark.parametrize("name", DENSE)
def test_bytes_are_those_of_the_keys_and_values(name: str) -> None:
    """All positions of a row, and room (or its window's), in float32; and they fall when a layer retires."""
    model, inputs = attach(build(name)), prompts()
    cache = SkipCache(model, TOP)
    probe = Probe(cache)
    model.generate(
        **inputs,
        **{CACHE: cache},
        max_new_tokens=NEW,
        do_sample=False,
        logits_processor=LogitsProcessorList([probe]),
    )
    _, kv_heads, size = heads(model)
    column = 2 * 4 * len(LENGTHS) * kv_heads * size
    for number, held in enumerate(probe.measure_layer_kv):
        length, keeps = WIDTH + number, TOP.layers(TOP.depth(number))
        limits = [window(model, layer) for layer in range(LAYERS)]
        kept = [WIDTH + BLOCK_SIZE if limit is None else min(length, limit - 1) for limit in limits]
        assert held == [kept[layer] * column if layer in keeps else 0 for layer in range(LAYERS)]
        if number > 0 and TOP.depth(number) < TOP.depth(number - 1):
            assert sum(held) < sum(probe.measure_layer_kv[number - 1])


@pytest.mark.parametrize("name", [name for name in SHARED if name in FAMILIES])
@every_schedule
def test_lenders_of_keys_run_as_long_as_their_borrowers(name: str, schedule: Schedule) -> None:
    """Whatever the order: the depths are those asked for, and no layer runs without the one whose keys it reads."""
    model = attach(build(name))
    plan, borrowed = SkipCache(model, schedule).schedule, kv_shared_layers(model.config)
    assert borrowed == {4: 2, 5: 3, 6: 2, 7: 3}
    for step in range(schedule.horizon + 1):
        assert plan.depth(step) == schedule.depth(step)
        running = plan.layers(plan.depth(step))
        assert all(borrowed[layer] in running for layer in running if layer in borrowed)


# --- 6: going deeper again (more in test_refusals.py)


@every_family
def test_a_second_turn_on_the_same_cache_is_refused(name: str) -> None:
    """New text after the answer would need the layers that were retired."""
    model, inputs = build(name), prompts()
    first = run(model, inputs, TOP)
    turn = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(turn), NEW + 3, dtype=torch.long)], dim=1)
    with pytest.raises(RuntimeError, match="new SkipCache"):
        model.generate(turn, attention_mask=mask, **{CACHE: first[CACHE]}, max_new_tokens=2)


@pytest.mark.parametrize("name", ["opt", "gemma3"])
def test_the_full_schedule_allows_a_second_turn(name: str) -> None:
    """Nothing is retired, so the cache goes on like an ordinary one."""
    model, inputs = attach(build(name)), prompts()
    turns = []
    for cache in (SkipCache(model, FULL), DynamicCache(config=model.config)):
        first = run(model, inputs, **{CACHE: cache})
        turn = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(turn), NEW + 3, dtype=torch.long)], dim=1)
        turns.append(run(model, {"input_ids": turn, "attention_mask": mask}, **{CACHE: cache}))
    assert same(*turns)


# --- 7: work falls


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


@pairs(["prompt"], ["top"])
def test_a_pass_costs_each_layer_the_positions_it_runs(name: str, schedule: str) -> None:
    """Forward: each layer costs what it costs in a stock pass over just its own positions, counted, not computed."""
    model, length = build(name, "eager"), 24
    mask = prompts()["attention_mask"]
    sequences = torch.randint(2, 128, (len(mask), length))

    def flops(plan: Schedule, width: int = length) -> list[int]:
        with torch.no_grad(), Flops(model) as counter:
            uncached(model, plan, sequences[:, :width], mask)
        return counter.layers

    attach(model)
    plan = bind(SCHEDULES[schedule], model.config)
    counts = plan.positions_per_layer(WIDTH, length)
    assert sum(counts) < LAYERS * length
    alone = {width: flops(FULL, width) for width in {*counts} if width > WIDTH}
    alone[WIDTH] = flops(FULL, WIDTH)
    for layer, (count, ran) in enumerate(zip(counts, flops(plan), strict=True)):
        if count >= WIDTH:
            assert ran == alone[count][layer]
        else:
            assert ran < alone[WIDTH][layer]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("schedule", ["top", "prompt"])
def test_a_training_step_costs_the_columns_it_runs(name: str, schedule: str) -> None:
    """Forward plus backward: three times each layer's products over its own columns, and the rest of the model."""
    model, length = attach(build(name, "eager")).train(), 24
    mask = prompts()["attention_mask"]
    sequences = torch.randint(2, 128, (len(mask), length))

    def flops(plan: Schedule) -> int:
        model.zero_grad()
        with Flops(model) as counter:
            uncached(model, plan, sequences, mask).logits.square().mean().backward()
        return counter.total

    columns = SCHEDULES[schedule].positions_per_layer(WIDTH, length)
    assert sum(columns) < LAYERS * length
    per_layer = [
        layer_flops(model, i, len(mask), length, length) - layer_flops(model, i, len(mask), n, n)
        for i, n in enumerate(columns)
    ]
    assert flops(FULL) - flops(SCHEDULES[schedule]) == 3 * sum(per_layer)


# --- the ways of generate


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "qwen2-mixed", "gemma3"])
def test_beam_scores_are_teacher_forced_scores(name: str) -> None:
    """Beams reorder the cache: each returned sequence's score is the sum of its teacher-forced log probabilities."""
    model, inputs = build(name), prompts()
    output = run(model, inputs, TOP, num_beams=3, num_return_sequences=3, length_penalty=0.0, output_scores=True)
    mask = inputs["attention_mask"].repeat_interleave(3, dim=0)
    logits = new_token_logits(model, TOP, output.sequences, mask).log_softmax(-1)
    scores = logits.gather(-1, output.sequences[:, WIDTH:, None]).sum((1, 2))
    torch.testing.assert_close(output.sequences_scores, scores, rtol=0, atol=1e-4)
    assert output[CACHE].step_depths == [TOP.depth(g) for g in range(STEPS)]


@pytest.mark.parametrize("name", ["opt", "llama", "gemma3"])
def test_sampling_repeats_and_is_teacher_forced(name: str) -> None:
    """The same seed gives the same tokens; the logits they were drawn from are the teacher-forced ones."""
    model, inputs, outputs = build(name), prompts(), []
    for _ in range(2):
        set_seed(7)
        outputs.append(run(model, inputs, TOP, do_sample=True, temperature=1.5, top_p=0.9, num_return_sequences=2))
    assert same(*outputs)
    mask = inputs["attention_mask"].repeat_interleave(2, dim=0)
    sequences = outputs[0].sequences
    assert distance(torch.stack(outputs[0].logits, 1), new_token_logits(model, TOP, sequences, mask)) < TOLERANCE
    assert not torch.equal(sequences, run(model, inputs, TOP, num_return_sequences=1).sequences.repeat_interleave(2, 0))


class _Stream(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("name", ["opt", "llama", "gemma3"])
def test_streaming_receives_the_tokens(name: str) -> None:
    """A streamer is given the prompt and then what generate returns."""
    model, stream = build(name), _Stream()
    output = run(model, row(prompts(), 0), TOP, streamer=stream)
    assert stream.tokens == output.sequences[0].tolist()
    assert stream.ended


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "opt-post-norm", "gpt2", "gpt-neox", "llama", "gemma3", "phi"])
@pytest.mark.parametrize("schedule", ["top", "bottom"])
def test_hidden_states_pass_through_skipped_layers(name: str, schedule: str) -> None:
    """L + 1 hidden states at each step; a skipped layer's is the one before it; the final norm always runs."""
    model, plan = build(name), SCHEDULES[schedule]
    output = run(model, prompts(), plan, output_hidden_states=True)
    assert len(output.hidden_states) == NEW
    for step, states in enumerate(output.hidden_states[1:]):
        assert len(states) == LAYERS + 1
        running = plan.layers(plan.depth(step))
        for layer in range(LAYERS - 1):  # the last entry is taken after the final norm
            assert torch.equal(states[layer + 1], states[layer]) == (layer not in running)
        logits = model.get_output_embeddings()(states[-1])[:, -1]
        assert distance(logits, output.logits[step + 1]) < TOLERANCE


@every_family
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    """The backward pass recomputes each layer on the same columns."""
    model, inputs = attach(build(name)).train(), prompts()
    sequences = torch.cat([inputs["input_ids"], torch.randint(2, 128, (len(LENGTHS), 12))], dim=1)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        with teacher_forced(model, TOP, WIDTH):
            logits = uncached(model, TOP, sequences, inputs["attention_mask"]).logits[:, WIDTH - 1 : -1]
            nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, WIDTH:].flatten()).backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    # Where layers lend each other keys, transformers' own gradients are wrong with reentrant checkpoints.
    for reentrant in (False,) if kv_shared_layers(model.config) else (False, True):
        # transformers 5.23 changed the name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        assert all(layer.gradient_checkpointing for layer in decoder_layers(model))
        checkpointed = gradients()
        assert checkpointed.keys() == plain.keys()
        for key, gradient in plain.items():
            torch.testing.assert_close(checkpointed[key], gradient, rtol=1e-5, atol=1e-7)
