"""attach and detach leave a model as it was; generate skips in anybody's loop; teacher forcing."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    pipeline,
)

import skipdecode
from helpers.families import (
    ATTENTIONS,
    FAMILIES,
    FORMS,
    LAYERS,
    LENGTHS,
    SCHEDULES,
    STEPS,
    TOP,
    WIDTH,
    build,
    distance,
    new_token_logits,
    prompts,
    run,
    same,
    uncached,
)
from helpers.tiny import TEXTS, save_checkpoint
from skipdecode import Schedule, SkipCache, attach, detach, teacher_forced
from skipdecode.errors import (
    CacheError,
    ModelError,
    ScheduleError,
    UsageError,
)
from skipdecode.model.attach import TeacherForcedPass
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import to_config_entry
from skipdecode.model.gate import Gate, Patch, patches_on, put
from skipdecode.model.inspect import decoder_layers, gates_of, kv_shared_layers


def logits_of(model: PreTrainedModel, **options: Any) -> tuple[Tensor, ...]:
    """What a plain ``generate`` of left-padded prompts computes, step by step."""
    return run(model, prompts(), **options).logits


def equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Whether all steps' logits are the same bits."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


FULL = Schedule.full(LAYERS)


every_family = pytest.mark.parametrize("name", FAMILIES)


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


def test_a_forward_found_on_a_layer_is_kept() -> None:
    """An instance-level forward (as accelerate's hooks set) runs inside the gate, and is put back by detach."""
    model, calls = build("gpt2"), [0] * LAYERS

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


@pytest.mark.parametrize("name", ["gpt-neo", "gemma4"])
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_independent(name: str, way: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    """The gates of a copy belong to the copy's layers and plan; the original does not feel it."""
    model, inputs = attach(build(name)), prompts()
    before, twin = run(model, inputs, TOP), way(model)
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


def test_an_attached_model_trains_and_saves_as_the_stock_one(tmp_path: Path) -> None:
    """A trainer that knows nothing of us gets the stock gradients, to the bit; what is saved is a stock model."""
    ids, gradients = torch.randint(2, 128, (2, 12)), []
    for gated in (False, True):
        model = build("llama").train()
        if gated:
            attach(model)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    expected = run(model.eval(), prompts(), TOP).sequences
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not gates_of(loaded)
    assert torch.equal(run(loaded, prompts(), TOP).sequences, expected)


def test_accelerates_hooks_may_come_after_the_gates() -> None:
    """Layers whose forward is wrapped after attach (offloading) are gated once, and detach finds the gates below."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = attach(build("llama")), prompts()
    expected = run(model, inputs, TOP).sequences
    for layer in decoder_layers(model):
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    attach(model)
    assert torch.equal(run(model, inputs, TOP).sequences, expected)
    detach(model)
    assert not [v for m in model.modules() for v in vars(m).values() if isinstance(v, Patch)]
    assert torch.equal(run(model, inputs).sequences, run(build("llama"), inputs).sequences)


@pytest.mark.parametrize("name", FORMS)
def test_a_plain_generate_is_that_of_a_cache_given_by_hand(name: str) -> None:
    """Each call gets a cache of its own: the second writes what the first did; detached, the model is as it was."""
    model, few = build(name), partial(logits_of, max_new_tokens=5)
    stock, by_hand = few(model), run(model, prompts(), TOP, max_new_tokens=5).logits
    assert equal(few(attach(model, TOP)), by_hand)
    assert equal(few(model), by_hand)
    assert not equal(by_hand, stock)
    assert equal(few(detach(model)), stock)
    assert "generate" not in vars(model)


def test_a_patched_method_has_its_name_and_text() -> None:
    model, names = attach(build("llama"), TOP), ("__module__", "__name__", "__qualname__", "__doc__")
    for method in ("generate", "forward"):
        own, stock = getattr(model, method), getattr(type(model), method)
        assert [getattr(own, name) for name in names] == [getattr(stock, name) for name in names]


def test_nan_never_becomes_a_token() -> None:
    """At whatever step, in ``model.generate`` too: greedy decoding would write token 0 to the end."""
    model, passes = attach(build("llama"), TOP), itertools.count()

    def break_logits(head: nn.Module, args: Any, logits: Tensor) -> Tensor:
        return logits * (torch.nan if next(passes) == 3 else 1.0)

    model.get_output_embeddings().register_forward_hook(break_logits)
    with pytest.raises(ModelError, match="logits are NaN"):
        run(model, prompts())
    assert next(passes) == 4


def test_attention_weights_by_layer_are_refused() -> None:
    """Those of layers that ran would stand in the places of others; hidden states are those that are passed on."""
    model = attach(build("llama", "eager"), TOP)
    with pytest.raises(UsageError, match="output_attentions"):
        run(model, prompts(), output_attentions=True)
    with pytest.raises(UsageError, match="output_router_logits"):
        logits_of(attach(build("mixtral"), TOP), output_router_logits=True)
    states = run(model, prompts(), output_hidden_states=True).hidden_states
    assert all(len(step) == LAYERS + 1 for step in states)


def test_the_last_schedule_given_decides_and_none_leaves_it() -> None:
    """What calls ``attach`` for its gates alone (SkipCache's users, ours among them) takes no schedule away."""
    model = attach(build("llama"), TOP)
    other = SCHEDULES["bottom"]
    assert equal(logits_of(attach(attach(model, other))), run(build("llama"), prompts(), other).logits)


def test_a_cache_that_is_given_goes_first() -> None:
    """Full depth is had with an ordinary cache, another schedule with its SkipCache."""
    model, other = attach(build("llama"), TOP), SCHEDULES["bottom"]
    assert equal(logits_of(model, **{CACHE: DynamicCache(config=model.config)}), logits_of(build("llama")))
    given = logits_of(model, **{CACHE: SkipCache(model, other)})
    assert equal(given, run(build("llama"), prompts(), other).logits)


def test_another_kind_of_cache_is_refused_in_a_call_and_gives_way_in_a_checkpoint() -> None:
    model = attach(build("llama"), schedule=TOP)
    inputs = prompts()
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    with pytest.raises(UsageError, match="cache_implementation='static': skipping needs a SkipCache"):
        model.generate(**inputs, max_new_tokens=4, do_sample=False, cache_implementation="static")
    with pytest.raises(UsageError, match="cache_implementation='static': skipping needs a SkipCache"):
        model.generate(**inputs, generation_config=GenerationConfig(cache_implementation="static"))
    model.generation_config.cache_implementation = "static"
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_caller_may_use_the_older_name_of_a_cache() -> None:
    """As transformers 5.24 lets them, with a warning: in ``generate``, and in a pass."""
    model = attach(build("llama"), TOP)
    cache, inputs = SkipCache(model, SCHEDULES["even"]), prompts()
    assert run(model, inputs, past_key_values=cache)[CACHE] is cache
    assert model(**inputs, past_key_values=(again := SkipCache(model, TOP)))[CACHE] is again


def test_a_method_that_a_module_lacks_is_not_made_up() -> None:
    """Older releases and decoders without a head lack some; a second patch of a kind does not stack upon the first."""
    module = nn.Linear(2, 2)
    for _ in range(2):
        put(Patch, module, "generate", None)
        put(Patch, module, "forward", None)
    assert not hasattr(module, "generate")
    assert [name for name, _ in patches_on(module)] == ["forward"]


def test_a_speedup_means_the_schedule_of_the_models_config() -> None:
    """As everywhere: the trained one for it, else that budget in the form of the fastest trained one."""
    model = build("llama")
    trained = Schedule(8, 3, 2, 6, order="even")
    model.config.skipdecode = to_config_entry({3: trained})
    assert equal(logits_of(attach(model, speedup=3)), run(build("llama"), prompts(), trained).logits)
    like_it = Schedule.for_speedup(4, 8, order="even")
    assert equal(logits_of(attach(model, speedup=4)), run(build("llama"), prompts(), like_it).logits)


def test_what_cannot_be_meant_is_refused_before_anything_changes() -> None:
    """A schedule for another model, both a schedule and a speed-up, a model without its head, a step without a cache.

    Continuous batching, whose passes would run all layers.
    """
    model = build("llama")
    with pytest.raises(UsageError, match="one of schedule and speedup"):
        attach(model, TOP, speedup=3)
    with pytest.raises(ScheduleError, match="for 6 layers, the model has 8"):
        attach(model, Schedule(6, 3, 2, 4))
    with pytest.raises(ModelError, match="does not generate"):
        attach(model.model, speedup=2)
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(CacheError, match="use_cache=False"):
        logits_of(attach(model, TOP), use_cache=False)
    with pytest.raises(UsageError, match="continuous batching runs all layers"):
        model.generate_batch([[5, 6]])
    assert "init_continuous_batching" not in vars(detach(model))


def test_a_pipeline_over_a_list_skips(tmp_path: Path) -> None:
    """transformers' pipeline, in batches: its texts are those of ``skipdecode.generate``, not the full model's."""
    model, tokenizer = skipdecode.load(str(save_checkpoint(tmp_path)), device="cpu")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plan = Schedule.for_speedup(4, 8, horizon=64, decay="linear")
    expected = [c.text for c in skipdecode.generate(model, tokenizer, TEXTS[:5], schedule=plan, **options).completions]
    full = [c.text for c in skipdecode.generate(model, tokenizer, TEXTS[:5], speedup=1, **options).completions]
    assert expected != full
    writer = pipeline("text-generation", model=attach(model, plan), tokenizer=tokenizer, batch_size=2)
    found = [text["generated_text"].strip() for [text] in writer(TEXTS[:5], return_full_text=False, **options)]
    assert found == [text.strip() for text in expected]
    after = skipdecode.generate(model, tokenizer, TEXTS[:5], speedup=1, **options)
    assert [completion.text for completion in after.completions] == full


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_before_and_after() -> None:
    """Adapters put around an attached model, or attached around adapters: the call that generates is one's own."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules="all-linear")
    expected = torch.stack(run(build("llama"), prompts(), TOP).logits)  # new adapters change nothing
    for model in (
        peft.get_peft_model(attach(build("llama"), TOP), adapter),
        attach(peft.get_peft_model(build("llama"), adapter), TOP),
    ):
        assert distance(torch.stack(logits_of(model)), expected) < 1e-4


def test_an_error_inside_generate_leaves_nothing_behind() -> None:
    """What came through a layer's pass is over; the next call, stock or not, is right."""
    model, inputs = attach(build("llama")), prompts()
    stock, skipped = run(model, inputs), run(model, inputs, TOP)
    for at in (0, 3):
        calls: list[int] = []

        def fail(module: Any, args: Any, at: int = at, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) > at:
                raise KeyboardInterrupt

        layer: Any = decoder_layers(model)[7]
        handle = layer.mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            run(model, inputs, TOP)
        handle.remove()
        assert torch.equal(run(model, inputs).sequences, stock.sequences)
        assert torch.equal(run(model, inputs, TOP).sequences, skipped.sequences)


def test_nothing_is_kept_of_a_call() -> None:
    """Caches and the models they belong to are given back."""
    model = attach(build("llama"))
    caches = []
    for _ in range(3):
        cache = SkipCache(model, TOP)
        run(model, prompts(), **{CACHE: cache}, max_new_tokens=3)
        caches.append(weakref.ref(cache))
        del cache
    gc.collect()
    assert not any(cache() for cache in caches)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


@pytest.mark.slow
def test_compiled_layers_skip_and_are_not_compiled_anew_at_every_step() -> None:
    """With torch.compile around each layer, texts are the same and compilation ends."""
    (config_class, options), layers = FAMILIES["opt"], 3
    model = AutoModelForCausalLM.from_config(config_class(**options | {"num_hidden_layers": layers})).eval()
    few = functools.partial(run, model, prompts(), max_new_tokens=9)
    plan = Schedule(layers, 2, 1, horizon=3)
    expected = few(plan).sequences
    torch._dynamo.reset()
    detach(model)
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, backend="eager")
    assert torch.equal(few(plan).sequences, expected)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    few(plan.replace(order="bottom"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= compiled + layers
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_compiled_model_is_attached_like_the_one_inside() -> None:
    """``torch.compile(model)``, whose attributes are the inner model's: once, however often, and detached whole."""
    model = build("llama")
    expected = run(attach(model), prompts(), TOP).sequences
    detach(model)
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(3):
        assert attach(compiled, schedule=TOP) is compiled
    assert len([*patches_on(model)]) == len({type(patch) for _, patch in patches_on(model)})
    assert torch.equal(run(compiled, prompts(), TOP).sequences, expected)
    detach(compiled)
    assert not [*patches_on(model)]
    torch._dynamo.reset()


def test_a_teacher_answers_for_the_width_of_the_pass() -> None:
    """Upper layers that are given fewer positions ask about the pass's own width; layer 0 begins the next pass."""
    teacher = TeacherForcedPass(TOP, 4)
    for width in (9, 12, 6):
        teacher.begin_layer(0, width)
        for layer in range(1, LAYERS):
            teacher.begin_layer(layer, 3)
        assert teacher.counts == TOP.positions_per_layer(4, width)
    for layer, count in enumerate(TOP.positions_per_layer(4, 20)):
        again = TeacherForcedPass(TOP, 4)
        again.begin_layer(0, 6)
        assert again.begin_layer(layer, 20) == count, "recomputation starts in the middle"


def test_teachers_may_stand_within_each_other() -> None:
    """The inner one's schedule runs inside, the outer one's again after it, and none after that."""
    model, ids = attach(build("opt")), torch.randint(2, 128, (2, WIDTH + 6))

    def logits() -> Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    plain = logits()
    with teacher_forced(model, SCHEDULES["bottom"], WIDTH):
        outer = logits()
        with teacher_forced(model, SCHEDULES["even"], WIDTH):
            assert not torch.equal(logits(), outer)
        assert torch.equal(logits(), outer)
    assert torch.equal(logits(), plain)


@pytest.mark.parametrize("name", FORMS)
def test_a_teacher_forced_pass_fills_no_cache(name: str) -> None:
    """``generate`` inside, as sampling in a training step does, would store parts of the positions: refused."""
    model, inputs = attach(build(name)), prompts()
    ids = torch.randint(2, 128, (2, 14))
    with torch.no_grad(), teacher_forced(model, TOP, 5):
        with pytest.raises(CacheError, match="teacher-forced"):
            run(model, inputs)
        for options in ({"use_cache": True}, {CACHE: DynamicCache(config=model.config)}):
            with pytest.raises(CacheError, match="teacher-forced"):
                model(ids, **options)
        output, expected = model(ids), model(ids, use_cache=False)
        assert getattr(output, CACHE) is None
        assert torch.equal(output.logits, expected.logits)
        inside = run(model, inputs, TOP)
    assert torch.equal(inside.sequences, run(model, inputs, TOP).sequences), "a SkipCache follows its own schedule"


def test_a_model_without_gates_or_of_another_depth_is_refused() -> None:
    """By a SkipCache and by teacher forcing."""
    model, wrong = build("gpt2"), Schedule(LAYERS + 1, 4, 2, horizon=4)
    with pytest.raises(CacheError, match=r"skipdecode\.attach\(model\)"):
        SkipCache(model, TOP)
    with pytest.raises(ModelError, match=r"skipdecode\.attach\(model\)"), teacher_forced(model, TOP, 2):
        pass
    attach(model)
    with pytest.raises(ScheduleError, match="for 9 layers, the model has 8"):
        SkipCache(model, wrong)
    with pytest.raises(ScheduleError, match="for 9 layers, the model has 8"), teacher_forced(model, wrong, 2):
        pass


@pytest.mark.parametrize("name", FORMS)
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    """The backward pass recomputes each layer on the same columns."""
    model, inputs = attach(build(name)).train(), prompts()
    sequences = torch.cat([inputs["input_ids"], torch.randint(2, 128, (len(LENGTHS), 9))], dim=1)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        with teacher_forced(model, TOP, WIDTH):
            logits = uncached(model, TOP, sequences, inputs["attention_mask"]).logits[:, WIDTH - 1 : -1]
            nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, WIDTH:].flatten()).backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    # Where layers lend each other keys, transformers' own gradients are wrong with reentrant checkpoints.
    for reentrant in (False, True) if not kv_shared_layers(model.config) else (False,):
        # transformers 5.23 changed the name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        assert all(layer.gradient_checkpointing for layer in decoder_layers(model))
        checkpointed = gradients()
        assert checkpointed.keys() == plain.keys()
        for key, gradient in plain.items():
            torch.testing.assert_close(checkpointed[key], gradient, rtol=1e-5, atol=1e-7)
