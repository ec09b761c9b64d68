"""What people do with an attached model beside calling generate once: threads, copies, wrappers, compilers, loops."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    GPTNeoXJapaneseConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RwkvConfig,
)

from helpers.families import (
    FAMILIES,
    FORMS,
    LAYERS,
    NEW,
    SCHEDULES,
    TOP,
    WIDTH,
    build,
    decode,
    distance,
    new_token_logits,
    prompts,
    reference_logits,
    run,
    uncached,
)
from skipdecode import Schedule, SkipCache, attach, detach, teacher_forced
from skipdecode.errors import CacheError, UnsupportedModel
from skipdecode.evaluation.exactness import CHECKS, run_checks
from skipdecode.model.cache import total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.gate import Patch, PositionSlice, patches_on
from skipdecode.model.inspect import decoder_layers

FULL = Schedule.full(LAYERS)


# --- what cannot be exact is refused by what it is


TINY = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4}
KINDS: dict[str, tuple[PreTrainedConfig, str]] = {
    "a state in no cache": (RwkvConfig(**TINY, attention_hidden_size=32), f"takes no {CACHE}"),
    "a cache of its own": (
        MiniMaxConfig(**TINY, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, head_dim=8),
        "cache of its own",
    ),
    "looks ahead": (BertConfig(**TINY, num_attention_heads=4, intermediate_size=32), "looks ahead"),
    "a decoder made to look ahead": (
        LlamaConfig(**TINY, num_attention_heads=4, intermediate_size=32, is_causal=False),
        "looks ahead",
    ),
    "an embedding model": (
        Gemma3TextConfig(
            **TINY,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=32,
            use_bidirectional_attention=True,
        ),
        "looks ahead",
    ),
    "layers that reuse what others selected": (
        GlmMoeDsaConfig(
            **TINY,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=32,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            head_dim=4,
            n_routed_experts=4,
            moe_intermediate_size=16,
            indexer_types=["full", "shared", "full", "shared"],
        ),
        "reuse what the layer below selected",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_cannot_skip_exactly_is_refused_by_what_it_is(kind: str) -> None:
    """Before anything runs, with the reason; and it is left as it was."""
    config, reason = KINDS[kind]
    model = AutoModelForCausalLM.from_config(config)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModel, match=reason):
        attach(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_mamba_skips_where_its_cache_has_the_name_of_all_others() -> None:
    """Before transformers 5.24, it calls it ``cache_params``."""
    model = AutoModelForCausalLM.from_config(MambaConfig(**TINY, state_size=8))
    findings = list(run_checks(model, Schedule(4, 2, 1, horizon=4)))
    if CACHE == "cache":
        assert [finding.held for finding in findings] == [True] * 7
    else:
        assert "takes no past_key_values" in findings[0].detail


@pytest.mark.parametrize("kind", KINDS)
def test_check_fails_on_what_is_refused(kind: str) -> None:
    """With the reason, as its only finding."""
    config, reason = KINDS[kind]
    (finding,) = run_checks(AutoModelForCausalLM.from_config(config), Schedule(4, 2, 1, horizon=4))
    assert not finding.held
    assert reason in finding.detail


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in (*FORMS, "mixtral", "falcon-h1")])
def test_check_passes_on_every_family(name: str) -> None:
    """All its claims. (Of each form; the other tests hold the same for all of them.)"""
    findings = list(run_checks(build(name), Schedule(LAYERS, 6, 2, horizon=8)))
    assert [finding for finding in findings if not finding.held] == []
    assert len(findings) == len(CHECKS)


def test_what_a_config_says_of_looking_ahead_is_tried_out() -> None:
    """GPT-NeoX-Japanese says is_decoder=False, as BERT does, and looks back only."""
    config = GPTNeoXJapaneseConfig(**TINY, num_attention_heads=4, intermediate_multiple_size=2)
    assert config.is_decoder is False
    model = AutoModelForCausalLM.from_config(config).train()
    attach(model)
    assert model.training
    with pytest.raises(UnsupportedModel, match="looks ahead"):
        attach(AutoModel.from_config(KINDS["an embedding model"][0]))


# --- the cache knows its model, and notices when it is not asked

#: PEFT still asks by the old name.
peft_asks = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.mark.parametrize("layers", [4, 8, 12])
def test_another_models_cache_is_refused(layers: int) -> None:
    """F9: with fewer layers, as many, or more."""
    config_class, options = FAMILIES["llama"]
    other = AutoModelForCausalLM.from_config(config_class(**{**options, "num_hidden_layers": layers}))
    cache = SkipCache(attach(other), Schedule(layers, 3, 2, horizon=4))
    with pytest.raises(CacheError, match="made for another model"):
        run(attach(build("llama")), prompts(), **{CACHE: cache})


def test_a_pass_that_drops_the_cache_is_noticed() -> None:
    """F9: gradient checkpointing in training mode drops caches: full depth would run, and step_depths claim depths."""
    model = attach(build("llama")).train()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    with pytest.raises(CacheError, match=r"SkipCache.*model\.eval"):
        model(**prompts(), **{CACHE: SkipCache(model, TOP)})
    assert run(model.eval(), prompts(), TOP)[CACHE].step_depths[0] == TOP.depth(0)


@peft_asks
def test_prefix_tuning_is_noticed() -> None:
    """F9: PEFT's prefix tuning puts a cache of its own in our place."""
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(attach(build("llama")), config)
    cache = SkipCache(model.base_model, TOP)
    with pytest.raises(CacheError, match="dropped on the way"):
        model.generate(**prompts(), **{CACHE: cache}, max_new_tokens=3)


@peft_asks
@pytest.mark.parametrize("before", [True, False], ids=["attached-before", "attached-after"])
def test_adapters_keep_the_guard_against_second_prompts(before: bool) -> None:
    """B4: whether attach comes before LoRA or after; twice is once."""
    peft = pytest.importorskip("peft")
    model = build("llama")
    model = peft.get_peft_model(attach(model) if before else model, peft.LoraConfig(target_modules="all-linear"))
    attach(attach(model))
    inputs, base = prompts(), build("llama")
    cache = SkipCache(model, TOP)
    output = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(output, run(base, inputs, TOP).sequences)  # fresh adapters change nothing
    for new in (2, WIDTH):
        with pytest.raises(CacheError, match="new SkipCache"):
            model.generate(**inputs, **{CACHE: cache}, max_new_tokens=new)


def test_running_without_a_cache_is_refused_in_words_that_fit() -> None:
    """G: use_cache=False feeds the whole text at every step."""
    with pytest.raises(CacheError, match="use_cache=False"):
        run(build("llama"), prompts(), TOP, use_cache=False)


def test_a_cache_cannot_be_reset() -> None:
    """What its layers held is gone."""
    cache = run(build("llama"), prompts(), TOP)[CACHE]
    with pytest.raises(CacheError, match="make a new one"):
        cache.reset()


# --- the teacher-forced pass


def test_teacher_forcing_holds_for_its_own_thread() -> None:
    """F8: a stock pass in another thread is the stock model's, and two teachers do not meet."""
    model, mask = attach(build("llama")), prompts()["attention_mask"]
    ids = torch.randint(2, 128, (len(mask), 20))
    stock = run(model, prompts())
    expected = {name: uncached(model, SCHEDULES[name], ids, mask).logits for name in ("top", "bottom", "even")}
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with teacher_forced(model, TOP, WIDTH):
            inside.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert inside.wait(60)
        assert torch.equal(run(model, prompts()).sequences, stock.sequences)
        for name, logits in expected.items():
            assert torch.equal(uncached(model, SCHEDULES[name], ids, mask).logits, logits)
    finally:
        done.set()
        holder.join()


def test_teacher_forcing_fits_every_width() -> None:
    """B2: the width is that of the pass, so that it cannot be given wrongly; several may follow each other."""
    model = attach(build("llama"))
    with torch.no_grad():
        for width in (WIDTH, 12, 30, 10):
            ids, mask = torch.randint(2, 128, (2, width)), torch.ones(2, WIDTH, dtype=torch.long)
            expected = reference_logits(model, TOP, torch.cat([ids, ids[:, :1]], 1), mask)
            attach(model)
            with teacher_forced(model, TOP, WIDTH):
                for other in (7, width):
                    logits = model(ids[:, :other], use_cache=False).logits
            assert distance(logits[:, WIDTH - 1 :], expected) < 1e-5


def test_the_form_of_layers_is_not_learnt_from_who_ran_before() -> None:
    """B3: GPT-Neo's layers return tuples; here its first layers have no position in the very first pass."""
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


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("attention_mask", (2, 1, 9, 9), torch.float32, (2, 1, 4, 4)),
        ("attention_mask", (2, 1, 1, 9), torch.bool, (2, 1, 1, 4)),
        ("attention_mask", (2, 9), torch.int64, (2, 4)),
        ("alibi", (8, 1, 9), torch.float32, (8, 1, 4)),
        ("position_bias", (4, 1, 64), torch.float32, (4, 1, 64)),
        ("position_ids", (2, 9), torch.int64, (2, 4)),
        ("position_ids", (3, 9, 9), torch.int64, (3, 9, 4)),
        ("position_embeddings", (1, 9, 8), torch.float32, (1, 4, 8)),
        ("position_embeddings", (3, 2, 9, 9), torch.float32, (3, 2, 4, 9)),
        ("position_embeddings", (2, 9, 8), torch.complex64, (2, 4, 8)),
        ("per_layer_input", (9, 9, 9), torch.float32, (9, 4, 9)),
        ("hidden_states", (3, 2, 9, 32), torch.float32, (3, 2, 4, 32)),
        ("weights", (9, 32, 8, 16), torch.float32, (9, 32, 8, 16)),
        ("cache_position", (9,), torch.int64, (4,)),
    ],
)
def test_a_prefix_is_cut_where_the_positions_are(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: tuple[int, ...]
) -> None:
    """B17: what a four-dimensional tensor means is told by its name, not taken for a mask."""
    value = torch.zeros(shape, dtype=dtype)
    (), cut = PositionSlice(9, 4, 9).of_call(lambda **kwargs: None, (), {name: value})
    assert tuple(cut[name].shape) == expected


def test_a_mask_that_shows_no_positions_is_refused() -> None:
    """B17: it is not cut at a venture."""
    with pytest.raises(CacheError, match="does not show its 9 positions"):
        PositionSlice(9, 4, 9).of_call(lambda **kwargs: None, (), {"attention_mask": torch.zeros(2, 1, 9, 12)})


# --- compilers


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "layers"])
def test_compiled_models_skip_and_are_not_compiled_anew_at_every_step(part: str) -> None:
    """G: with torch.compile around the model, or around each layer, texts are the same and compilation ends."""
    (config_class, options), layers = FAMILIES["opt"], 3
    model = AutoModelForCausalLM.from_config(config_class(**options | {"num_hidden_layers": layers})).eval()
    few = functools.partial(run, attach(model), prompts(), max_new_tokens=6)
    plan = Schedule(layers, 2, 1, horizon=4)
    expected = few(plan).sequences
    torch._dynamo.reset()
    if part == "model":
        model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    else:
        detach(model)
        for layer in decoder_layers(model):
            layer.forward = torch.compile(layer.forward, backend="eager", dynamic=True)
    assert torch.equal(few(plan).sequences, expected)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    for order in ("bottom", "even", "top"):
        few(plan.replace(order=order))
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


# --- held: threads, copies, exceptions, leaks


@pytest.mark.slow
def test_threads_generate_at_once() -> None:
    """Held: several schedules at the same time on one model, none wrong."""
    model, inputs = attach(build("llama")), prompts()
    plans = [*SCHEDULES.values(), None]
    expected = [run(model, inputs, plan).sequences for plan in plans]

    def one(index: int) -> bool:
        index %= len(plans)
        return torch.equal(run(model, inputs, plans[index]).sequences, expected[index])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(2 * len(plans))))


@pytest.mark.parametrize("name", ["opt", "gpt-neo", "gemma4"])
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_skip_as_the_original(name: str, way: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    """Held: a copied model is attached, and its caches are its own."""
    model, inputs = attach(build(name)), prompts()
    expected = run(model, inputs, TOP).sequences
    twin = way(model)
    assert torch.equal(run(twin, inputs, TOP).sequences, expected)
    with pytest.raises(CacheError, match="made for another model"):
        run(twin, inputs, **{CACHE: SkipCache(model, TOP)})


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_takes_nothing_of_what_is_under_way(way: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    """F8: copied while a thread is in a teacher-forced pass, a model is inert; the thread's passes on it are stock."""
    model, ids = attach(build("llama")), torch.randint(2, 128, (2, 20))
    stock = model(ids, use_cache=False).logits
    with teacher_forced(model, TOP, 5):
        twin = way(model)
    assert torch.equal(twin(ids, use_cache=False).logits, stock)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a fault in a layer")])
def test_an_error_inside_generate_leaves_nothing_behind(error: Any) -> None:
    """Held: what came through a layer's pass is over; the next call, stock or not, is right."""
    model, inputs = attach(build("llama")), prompts()
    stock, skipped = run(model, inputs), run(model, inputs, TOP)
    for at in (0, 3):
        calls: list[int] = []

        def fail(module: Any, args: Any, at: int = at, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) > at:
                raise error

        layer: Any = decoder_layers(model)[7]
        handle = layer.mlp.register_forward_pre_hook(fail)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            run(model, inputs, TOP)
        handle.remove()
        assert torch.equal(run(model, inputs).sequences, stock.sequences)
        assert torch.equal(run(model, inputs, TOP).sequences, skipped.sequences)


@pytest.mark.parametrize("place", ["model.layers.1", "model.layers.3", "model.layers.7", "lm_head"])
def test_a_cache_whose_pass_was_cut_short_is_not_gone_on_with(place: str) -> None:
    """Some of its layers have seen the position and some have not, or all have and nobody was told."""
    model, inputs = attach(build("llama")), prompts()
    cache, passes = SkipCache(model, SCHEDULES["top-to-1"]), []

    def fail(module: Any, args: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            raise RuntimeError("a fault")

    handle = model.get_submodule(place).register_forward_pre_hook(fail)
    steps = decode(model, inputs, cache, 5)
    with pytest.raises(RuntimeError, match="a fault"):
        list(steps)
    handle.remove()
    with pytest.raises(CacheError, match="cut short"):
        model(inputs["input_ids"][:, -1:], **{CACHE: cache})


def test_a_prepared_pass_that_never_came_stops_no_other() -> None:
    """What was expected of it is forgotten with it."""
    model, inputs = attach(build("llama")), prompts()
    cache = SkipCache(model, TOP)
    model.prepare_inputs_for_generation(**inputs, **{CACHE: cache}, is_first_iteration=True)
    model(torch.randint(2, 128, (2, 5)))
    model.prepare_inputs_for_generation(**inputs, **{CACHE: cache}, is_first_iteration=True)
    del cache
    gc.collect()
    model(inputs["input_ids"])


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


@pytest.mark.parametrize("name", ["gpt-neo", "llama"])
def test_packing_is_refused_where_layers_are_not_told(name: str) -> None:
    """GPT-Neo gives its layers no position ids: the model's own are looked at."""
    model, packed = attach(build(name)), torch.tensor([[0, 1, 2, 3, 4, 5] * 2])
    ids = torch.randint(2, 128, packed.shape)
    with teacher_forced(model, TOP, 4), pytest.raises(CacheError, match="packed"):
        model(ids, position_ids=packed, use_cache=False)
    with pytest.raises(CacheError, match="packed"):
        model(ids, position_ids=packed, **{CACHE: SkipCache(model, TOP)})


def test_nothing_is_kept_of_a_call() -> None:
    """Held: caches and the models they belong to are given back."""
    model = attach(build("llama"))
    caches = []
    for _ in range(20):
        cache = SkipCache(model, TOP)
        run(model, prompts(), **{CACHE: cache})
        caches.append(weakref.ref(cache))
        del cache
    gc.collect()
    assert not any(cache() for cache in caches)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


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
    stands = [v for m in model.modules() for v in vars(m).values() if isinstance(v, Patch)]
    assert not stands
    assert torch.equal(run(model, inputs).sequences, run(build("llama"), inputs).sequences)


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


@pytest.mark.parametrize("name", ["opt", "llama", "gemma3"])
def test_a_loop_of_ones_own_skips_too(name: str) -> None:
    """Held: model(...) with a SkipCache and input embeddings gives generate's logits."""
    model, inputs = attach(build(name)), prompts()
    expected = run(model, inputs, TOP)
    logits = loop(model, inputs, SkipCache(model, TOP))
    assert distance(torch.stack(logits, 1), torch.stack(expected.logits, 1)) < 1e-5
    assert (
        distance(torch.stack(logits, 1), new_token_logits(model, TOP, expected.sequences, inputs["attention_mask"]))
        < 1e-5
    )
