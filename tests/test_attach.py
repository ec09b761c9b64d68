"""``attach(model, speedup=3)``: every ``generate`` call of the model gets a new SkipCache, in anybody's loop."""

from __future__ import annotations

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, pipeline

import skipdecode
from helpers.families import FAMILIES, SCHEDULES, TOP, build, distance, prompts, run
from helpers.tiny import TEXTS, save_checkpoint
from skipdecode import Schedule, SkipCache, attach, detach
from skipdecode.errors import CacheError, ModelError, ScheduleError, UntrainedWarning, UsageError
from skipdecode.evaluation.exactness import run_checks
from skipdecode.model import config as checkpoint_config
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import to_config_entry
from skipdecode.model.gate import Patch, patches_on, put


def logits_of(model: PreTrainedModel, **options: Any) -> tuple[Tensor, ...]:
    """What a plain ``generate`` of left-padded prompts computes, step by step."""
    return run(model, prompts(), **options).logits


def equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Whether all steps' logits are the same bits."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Whether they are equal but for rounding."""
    return all(distance(a, b) < 1e-4 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_generate_is_that_of_a_cache_given_by_hand(name: str) -> None:
    """Each call gets a cache of its own: the second writes what the first did; detached, the model is as it was."""
    model, few = build(name), partial(logits_of, max_new_tokens=5)
    stock, by_hand = few(model), run(model, prompts(), TOP, max_new_tokens=5).logits
    assert equal(few(attach(model, TOP)), by_hand)
    assert equal(few(model), by_hand)
    assert not equal(by_hand, stock)
    assert equal(few(detach(model)), stock)
    assert "generate" not in vars(model)


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


@pytest.mark.parametrize("asked", [None, "static"])
def test_a_generation_config_is_taken_without_a_word(asked: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    """As pipelines give one: transformers warns of options beside it, and none of ours is; by place and by name."""
    model, inputs = attach(build("llama"), TOP), prompts()
    expected = logits_of(model)
    config = GenerationConfig(max_new_tokens=16, do_sample=False, output_logits=True, return_dict_in_generate=True)
    config.cache_implementation = asked
    transformers.logging.set_verbosity_warning()
    try:
        mask = inputs["attention_mask"]
        assert equal(model.generate(inputs["input_ids"], config, attention_mask=mask).logits, expected)
        assert equal(model.generate(**inputs, generation_config=config).logits, expected)
    finally:
        transformers.logging.set_verbosity_error()
    assert asked or "generation_config" not in capfd.readouterr().err


@pytest.mark.parametrize("where", ["place", "name", "model", "nowhere"])
def test_the_kind_of_cache_that_a_generation_config_names_is_unset(where: str) -> None:
    """Wherever ``generate`` finds the config; a call that gives its own cache is passed on as it is."""
    model = attach(build("llama"), TOP)
    told: list[dict[str, Any]] = []
    model.generate.original = lambda *args, **kwargs: told.append(kwargs)
    config, ids = GenerationConfig(cache_implementation="static"), torch.zeros(1, 2, dtype=torch.long)
    if where == "model":
        model.generation_config = config
    given = {"place": (ids, config), "name": (ids,)}.get(where, (ids,))
    named = {"generation_config": config} if where == "name" else {}
    model.generate(*given, **named)
    cache = told[0].pop(CACHE)
    assert isinstance(cache, SkipCache)
    assert cache.schedule == TOP
    assert told[0] == named | ({} if where == "nowhere" else {"cache_implementation": None})
    model.generate(*given, **{CACHE: cache}, **named)
    assert told[1] == named | {CACHE: cache}


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
        put(Patch, module, "generate")
        put(Patch, module, "forward")
    assert not hasattr(module, "generate")
    assert [name for name, _ in patches_on(module)] == ["forward"]


def test_an_untrained_model_is_named_once_and_by_degree() -> None:
    """Each schedule once, whatever calls come; nothing where the model was trained."""
    model = build("llama")
    model.config._name_or_path = "a-stock-model"
    checkpoint_config._warn.cache_clear()

    def said(*calls: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for call in calls:
                call()
        return [str(warning.message) for warning in found if warning.category is UntrainedWarning]

    def cache() -> SkipCache:
        return SkipCache(model, Schedule.for_speedup(1.5, 8, 64, decay="linear"))

    texts = [said(partial(attach, model, speedup=speedup), partial(logits_of, model)) for speedup in (1.1, 1.5, 4)]
    assert [len(each) for each in texts] == [1, 1, 1]
    assert all("a-stock-model was not trained to skip layers" in each[0] for each in texts)
    for [text], word in zip(texts, ("calibrate", "poor", "no readable"), strict=True):
        assert word in text
    assert said(cache, cache, lambda: attach(model, speedup=4), lambda: SkipCache(model, Schedule.full(8))) == []
    checkpoint_config._warn.cache_clear()
    assert len(said(cache, cache)) == 1
    checkpoint_config._warn.cache_clear()
    own = Schedule.for_speedup(1.5, 8, 64, decay="linear")
    model.config.skipdecode = {"schedules": {"1.5": own.to_dict()}, "calibrated": {"1.5": "skipdecode"}}
    assert len(said(cache)) == 1, "calibrated is not trained"
    checkpoint_config._warn.cache_clear()
    model.config.skipdecode = to_config_entry({1.5: own})
    assert said(cache, lambda: attach(model, speedup=1.6)) == []
    assert "fewer than 5.5 layers" in said(lambda: attach(model, speedup=5))[0]


def test_beams_and_samples_follow_it() -> None:
    """What beams reorder and what is drawn is the default cache's as it would be one's own."""
    ways: list[dict[str, Any]] = [{"num_beams": 3}, {"do_sample": True, "top_k": 5}]
    for options in (*ways, {"do_sample": True, "num_return_sequences": 2}):
        torch.manual_seed(1)
        expected = run(build("llama"), prompts(), TOP, **options).sequences
        torch.manual_seed(1)
        assert torch.equal(run(attach(build("llama"), TOP), prompts(), **options).sequences, expected)


def test_a_speedup_means_the_schedule_of_the_models_config() -> None:
    """As everywhere: the trained one for it, else that budget in the form of the fastest trained one."""
    model = build("llama")
    trained = Schedule(8, 3, 2, 6, order="even")
    model.config.skipdecode = to_config_entry({3: trained})
    assert equal(logits_of(attach(model, speedup=3)), run(build("llama"), prompts(), trained).logits)
    style = Schedule.for_speedup(4, trained.num_layers, trained.horizon, **trained.style)
    assert equal(logits_of(attach(model, speedup=4)), run(build("llama"), prompts(), style).logits)


def test_what_the_checkpoint_says_of_its_cache_does_not_matter() -> None:
    """A generation_config with a static cache: the schedule's cache goes before it."""
    model = attach(build("llama"), TOP)
    model.generation_config.cache_implementation = "static"
    assert equal(logits_of(model), run(build("llama"), prompts(), TOP).logits)


def test_what_cannot_be_meant_is_refused_before_anything_changes() -> None:
    """A schedule for another model, both a schedule and a speed-up, a step without a cache."""
    model = build("llama")
    with pytest.raises(UsageError, match="one of schedule and speedup"):
        attach(model, TOP, speedup=3)
    with pytest.raises(ScheduleError, match="for 6 layers, the model has 8"):
        attach(model, Schedule(6, 3, 2, 4))
    with pytest.raises(ScheduleError, match="1 to the number of layers"):
        attach(model, speedup=9)
    assert "generate" not in vars(model)
    with pytest.raises(CacheError, match="use_cache=False"):
        logits_of(attach(model, TOP), use_cache=False)


def test_threads_copies_and_pickles_have_caches_of_their_own() -> None:
    """A copy's generate is the copy's: its cache belongs to it, and detaching one leaves the other."""
    expected = run(build("llama"), prompts(), TOP).logits
    model = attach(build("llama"), TOP)
    with ThreadPoolExecutor(4) as pool:
        assert all(equal(found, expected) for found in pool.map(lambda _: logits_of(model), range(8)))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(logits_of(twin), expected)
        detach(twin)
    assert equal(logits_of(model), expected)


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
    assert found == expected
    after = skipdecode.generate(model, tokenizer, TEXTS[:5], speedup=1, **options)
    assert [completion.text for completion in after.completions] == full


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_before_and_after() -> None:
    """Adapters put around an attached model, or attached around adapters: the call that generates is one's own."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules="all-linear")
    expected = run(build("llama"), prompts(), TOP).logits  # new adapters change nothing
    assert not close(expected, logits_of(build("llama")))
    assert close(logits_of(peft.get_peft_model(attach(build("llama"), TOP), adapter)), expected)
    assert close(logits_of(attach(peft.get_peft_model(build("llama"), adapter), TOP)), expected)


def test_checks_leave_the_default_schedule() -> None:
    """`check` takes the gates off in between; the model goes on as it was attached."""
    model = attach(build("llama"), TOP)
    expected = logits_of(model)
    assert all(finding.held for finding in run_checks(model, SCHEDULES["bottom"]))
    assert equal(logits_of(model), expected)


def test_a_model_without_its_head_cannot_be_given_a_speedup() -> None:
    """It does not generate; nothing is attached."""
    model = build("llama").model
    with pytest.raises(ModelError, match="does not generate"):
        attach(model, speedup=2)
    assert not any("forward" in vars(module) for module in model.modules())


def test_packed_rows_given_to_the_decoder_itself_are_refused() -> None:
    """Without the model's own entrance, the first layer's gate sees the position ids."""
    model = attach(build("llama"))
    ids, positions = torch.randint(2, 128, (1, 8)), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with pytest.raises(CacheError, match="packed"):
        model.model(ids, position_ids=positions, **{CACHE: SkipCache(model, TOP)}, use_cache=True)
