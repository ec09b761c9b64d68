"""``skipdecode.generate``: what may be asked, how texts are sampled, where they end."""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skipdecode.generation.batch import generate_batch
from skipdecode.generation.sampling import Sampling, stable_hash
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StoppingCriteria,
)
from transformers.generation import utils

import skipdecode
from helpers.tiny import TEXTS, run
from skipdecode import Schedule
from skipdecode.data.tokenize import train_tokenizer
from skipdecode.errors import ModelError, SkipDecodeError, UntrainedWarning, UsageError
from skipdecode.generation import generate as generating
from skipdecode.generation import options
from skipdecode.generation.generate import batches, generate_ids
from skipdecode.generation.stats import Completion, GenerationOutput, GenerationStats
from skipdecode.model import config as checkpoint_config
from skipdecode.model.cache import total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import CONFIG_KEY, schedule_for, to_config_entry
from skipdecode.model.inspect import decoder_layers

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def checkpoint(long_checkpoint: Path) -> Path:
    """With 256 positions."""
    return long_checkpoint


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Loaded:
    """The tiny model in fp32, and its tokenizer."""
    return skipdecode.load(str(checkpoint))


def texts(result: GenerationOutput) -> list[str]:
    return [row.text for row in result.completions]


# --- what may be asked


def test_one_string_is_one_prompt(loaded: Loaded) -> None:
    """F10: not one prompt per character."""
    one = skipdecode.generate(*loaded, "the cat", max_new_tokens=5)
    assert texts(one) == texts(skipdecode.generate(*loaded, ["the cat"], max_new_tokens=5))


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "no prompts"),
        (["", "the cat"], "prompt 0 has no token"),
        (["the cat", ""], "prompt 1 has no token"),
        (["the cat", 7], "prompt 1 is neither a text nor a list of messages: 7"),
        (["the cat", ["the dog"]], "prompt 1 is neither a text nor a list of messages"),
        (["the cat", None], "prompt 1 is neither a text nor a list of messages"),
        (["the cat", "\ud800"], "prompt 1 holds a lone surrogate"),
        (["the cat", [{"role": "user", "content": "\ud800"}]], "prompt 1 holds a lone surrogate"),
        (7, "prompts are texts or lists of messages"),
        (None, "prompts are texts or lists of messages"),
        ({"prompt": "x"}, "prompts are texts or lists of messages"),
    ],
)
def test_prompts_that_are_none_are_refused_by_their_index(loaded: Loaded, prompts: Any, words: str) -> None:
    """F10, G: before any work."""
    with pytest.raises(UsageError, match=words):
        skipdecode.generate(*loaded, prompts, max_new_tokens=5)


@pytest.mark.parametrize("count", [0, -1, "8", 2.0])
def test_a_number_of_new_tokens_that_is_none_is_refused(loaded: Loaded, count: Any) -> None:
    with pytest.raises(UsageError, match="max_new_tokens is a number of tokens, 1 or more"):
        skipdecode.generate(*loaded, "the cat", speedup=2, max_new_tokens=count)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": "4"}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"schedule": {"num_layers": 8}}, "schedule is a Schedule or the path of its JSON file"),
        ({"schedule": "nowhere.json"}, "nowhere.json"),
        ({"seed": "x"}, "seed"),
        ({"schedule": Schedule.full(8), "speedup": 2}, "one of speedup and schedule"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate: texts and their cost are returned"),
        ({"output_scores": True}, "output_scores"),
        ({"output_attentions": True}, "output_attentions"),
        ({"past_key_values": DynamicCache()}, "past_key_values: each batch has a cache of its own"),
        ({"cache": DynamicCache()}, "cache: each batch has a cache of its own"),
        ({"streamer": object()}, "streamer"),
        ({"attention_mask": torch.ones(1, 1)}, "attention_mask"),
        ({"input_ids": torch.ones(1, 1)}, "input_ids"),
        ({"generation_config": object()}, "generation_config"),
        ({"use_cache": False}, "use_cache=False: each batch has a cache of its own"),
        ({"use_cache": False, "speedup": 1}, "use_cache=False: each batch has a cache of its own"),
        ({"guidance_scale": 1.5}, "guidance_scale: it runs the model a second time"),
        ({"penalty_alpha": 0.6}, "penalty_alpha: transformers no longer has"),
        ({"max_new_tokens": 300}, "model has 256"),
        ({"max_length": 30}, "max_length: it counts the prompt and its padding.*give max_new_tokens"),
        ({"assistant_model": object(), "speedup": 1}, "assistant_model: what the draft costs"),
        ({"prompt_lookup_num_tokens": 3, "speedup": 1}, "one row at a time: give batch_size=1"),
    ],
)
def test_options_that_cannot_be_are_refused_with_a_reason(loaded: Loaded, options: Any, words: str) -> None:
    """F10, G: instead of an IndexError, a KeyError or a TypeError from below."""
    with pytest.raises((SkipDecodeError, FileNotFoundError), match=words):
        skipdecode.generate(*loaded, ["the cat"], **({"max_new_tokens": 5} | options))


@pytest.mark.parametrize("full", [False, True])
def test_none_is_not_given(loaded: Loaded, full: bool) -> None:
    """C2, C20: whichever option it is, so that none of ours is taken back; flags that ask for nothing do nothing."""
    plain = skipdecode.generate(*loaded, TEXTS[:3], full=full, max_new_tokens=6)
    names = {*vars(GenerationConfig()), *options.REFUSED, *signature(GenerationMixin.generate).parameters}
    none: dict[str, Any] = dict.fromkeys(names - {"self", "kwargs", "max_new_tokens"})
    again = skipdecode.generate(*loaded, TEXTS[:3], full=full, max_new_tokens=6, **none)
    assert again.completions == plain.completions
    flags: dict[str, Any] = {"output_scores": False, "use_cache": True, "num_return_sequences": 1, "num_beams": 1}
    assert texts(skipdecode.generate(*loaded, TEXTS[:3], full=full, max_new_tokens=6, **flags)) == texts(plain)


def test_as_many_tokens_as_transformers_writes(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how many: the checkpoint's new tokens, else 20."""
    model, tokenizer = loaded
    assert skipdecode.generate(model, tokenizer, "the cat", eos_token_id=-1).completions[0].tokens == 20
    monkeypatch.setattr(model.generation_config, "max_length", 9)  # which counts the prompt and its padding
    assert skipdecode.generate(model, tokenizer, "the cat", eos_token_id=-1).completions[0].tokens == 20
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 7)
    assert skipdecode.generate(model, tokenizer, "the cat", eos_token_id=-1).completions[0].tokens == 7


@pytest.mark.parametrize("new", [5, 30])
def test_a_new_schedule_falls_over_the_texts_to_come(loaded: Loaded, new: int) -> None:
    """N8: an untrained model's text of full length runs the layers that were asked for."""
    result = skipdecode.generate(*loaded, TEXTS[:2], speedup=2, max_new_tokens=new, eos_token_id=-1)
    assert result.stats.layer_ratio == pytest.approx(2, rel=0.15)


def test_an_untrained_model_is_named(loaded: Loaded) -> None:
    """C4: once in a process, where layers are skipped."""
    checkpoint_config._warn.cache_clear()
    with pytest.warns(UntrainedWarning, match="was not trained to skip layers"):
        skipdecode.generate(*loaded, "the cat", max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        skipdecode.generate(*loaded, "the cat", max_new_tokens=3)
    checkpoint_config._warn.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        skipdecode.generate(*loaded, "the cat", full=True, max_new_tokens=3)


@pytest.mark.parametrize("options", [{"speedup": 1}, {"speedup": 2}])
def test_a_model_that_computes_no_numbers_is_refused(loaded: Loaded, options: dict[str, Any]) -> None:
    """Not taken for one that writes the first token of the vocabulary."""
    model, tokenizer = deepcopy(loaded[0]), loaded[1]
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(ModelError, match="logits are NaN"):
        skipdecode.generate(model, tokenizer, "the cat", max_new_tokens=3, **options)


def test_memory_that_is_out_is_the_users_to_mend(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the batch."""
    model, tokenizer = loaded

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "generate", full)
    with pytest.raises(ModelError, match=r"2 rows of \d+ prompt tokens do not fit into memory"):
        skipdecode.generate(model, tokenizer, ["the cat", "the dog sat"], max_new_tokens=3)


def test_a_tokenizer_needs_no_padding_token(loaded: Loaded) -> None:
    """C6: padding is masked, so any token will do; also where no token ends a text."""
    model, tokenizer = copy.deepcopy(loaded[0]), copy.deepcopy(loaded[1])
    prompts = [*TEXTS[:2], "the cat"]  # of different lengths
    expected = texts(skipdecode.generate(*loaded, prompts, speedup=2, max_new_tokens=6, eos_token_id=-1))
    tokenizer.pad_token = None
    for ends in (model.generation_config.eos_token_id, None):
        model.generation_config.eos_token_id = ends
        model.generation_config.pad_token_id = None
        found = skipdecode.generate(model, tokenizer, prompts, speedup=2, max_new_tokens=6, eos_token_id=-1)
        assert texts(found) == expected


def test_computed_positions_have_no_end(tmp_path: Path) -> None:
    """C15: as transformers has it, RoPE goes on beyond the config's positions; a table of positions does not."""
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 320}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    kinds: list[dict[str, Any]] = [{}, {"rope_parameters": yarn}]
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    for kind in kinds:
        made = LlamaConfig(**config, intermediate_size=32, max_position_embeddings=16, eos_token_id=None, **kind)
        model = LlamaForCausalLM(made).eval()
        (row,) = skipdecode.generate(model, tokenizer, TEXTS[0], speedup=2, max_new_tokens=30).completions
        assert row.tokens == 30
    table = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=320)).eval()
    with pytest.raises(UsageError, match="the model has 16"):
        skipdecode.generate(table, tokenizer, TEXTS[0], speedup=2, max_new_tokens=30)


def test_prompts_beside_conversations_are_texts_or_refused(loaded: Loaded) -> None:
    """A text within a conversation, and half a character, belong nowhere."""
    for wrong in ([{"role": "user", "content": "hi"}, "hi"], ["hi", 7], [["hi", {"role": "user", "content": "hi"}]]):
        with pytest.raises(UsageError, match="is neither a text nor a list of messages"):
            skipdecode.generate(*loaded, cast(Any, wrong))
    for lone in ("\udfff", "\ud800"):
        with pytest.raises(UsageError, match="lone surrogate"):
            skipdecode.generate(*loaded, lone)


def test_the_last_position_is_taken(loaded: Loaded) -> None:
    """By the longest prompt; one more is refused, however short the others are."""
    prompts, asked = [[5] * 3, [5] * 252], cast(Any, {"decoding": None, "batch_size": 2, "eos_token_id": -1})
    assert generate_ids(*loaded, prompts, **asked, max_new_tokens=4).stats.tokens == 8
    with pytest.raises(UsageError, match="need 257 positions, the model has 256"):
        generate_ids(*loaded, prompts, **asked, max_new_tokens=5)
    assert generate_ids(*loaded, [], **asked, max_new_tokens=256).completions == []


def test_a_new_schedule_ends_with_the_texts(loaded: Loaded) -> None:
    """A step makes each token but the first; trained schedules have their own end."""
    config = copy.deepcopy(loaded[0].config)
    assert [schedule_for(config, 2, new_tokens=new).horizon for new in (1, 2, 20)] == [1, 1, 19]
    setattr(config, CONFIG_KEY, to_config_entry({2.0: Schedule(8, 6, 2, 12)}))
    assert schedule_for(config, 3, new_tokens=20).horizon == 12


@pytest.mark.parametrize(
    ("options", "seed", "draws"),
    [
        ({"do_sample": True}, 3, True),
        ({"do_sample": True}, None, False),
        ({}, 3, False),
        ({"do_sample": True, "num_beams": 2}, 3, False),
    ],
)
def test_only_a_seeded_sample_draws_for_itself(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], seed: int | None, draws: bool
) -> None:
    """The same in every run, and the process's random numbers stay where they were. Longest prompts come first."""
    seen = []

    def batch(*args: Any, **given: Any) -> tuple[list[Completion], GenerationStats]:
        seen.append((len(args[2][0]), given.get("watermarking_config"), torch.rand(1).item()))
        return [Completion("", 1, "stop")], GenerationStats(8, rows=1)

    monkeypatch.setattr(generating, "generate_batch", batch)
    torch.manual_seed(0)
    before, costs = torch.get_rng_state(), cast(list[GenerationStats], [])
    result = generate_ids(*loaded, [[1], [1, 2, 3], [1, 2]], None, 1, costs.append, seed, **options)
    assert [width for width, *_ in seen] == [3, 2, 1]
    assert [mark and (mark.seed, mark.rows) for _, mark, _ in seen] == [(3, [i]) if draws else None for i in (1, 2, 0)]
    assert len(costs) == result.stats.rows == 3
    seeded = seed is not None and "do_sample" in options
    assert torch.equal(torch.get_rng_state(), before) == seeded
    drawn = [number for *_, number in seen]
    seen.clear()
    generate_ids(*loaded, [[1], [1, 2, 3], [1, 2]], None, 1, seed=seed, **options)
    assert (drawn == [number for *_, number in seen]) == seeded


@pytest.mark.parametrize(
    ("checkpoint", "given", "seed", "words"),
    [
        ({"guidance_scale": 2.0}, {}, None, "asks for guidance_scale"),
        ({"guidance_scale": 2.0}, {"guidance_scale": None}, None, "asks for guidance_scale"),
        ({"guidance_scale": 2.0}, {"guidance_scale": 1.0}, None, None),
        ({"guidance_scale": 1.0}, {}, None, None),
        ({"encoder_repetition_penalty": 1.3}, {}, None, "asks for encoder_repetition_penalty"),
        ({"encoder_repetition_penalty": 1.0}, {}, None, None),
        ({"num_beam_groups": 2}, {}, None, "asks for num_beam_groups"),
        ({"num_beam_groups": 1}, {}, None, None),
        ({}, {"length_penalty": 2.0}, None, "goes with num_beams"),
        ({"num_beams": 2}, {"length_penalty": 2.0}, None, None),
        ({}, {"watermarking_config": {}, "do_sample": True}, 1, "leave one out"),
        ({"watermarking_config": {}}, {"do_sample": True}, 1, "leave one out"),
        ({}, {"watermarking_config": {}, "do_sample": True}, None, None),
        ({}, {"watermarking_config": {}}, 1, None),
        ({}, {"watermarking_config": {}, "do_sample": True, "num_beams": 2}, 1, None),
        ({}, {"do_sample": True}, 1, None),
    ],
)
def test_options_meet_the_checkpoints(
    checkpoint: dict[str, Any], given: dict[str, Any], seed: int | None, words: str | None
) -> None:
    """An option overrides what the checkpoint asks for; None does not."""
    with nullcontext() if words is None else pytest.raises(UsageError, match=words):
        options.check_with_model(given, GenerationConfig(**checkpoint), seed)


# --- what is counted


def test_the_costs_of_two_batches_add_up() -> None:
    """Memory does not: the larger peak counts. Figures of nothing are those of the full model."""
    nothing = GenerationStats(8)
    assert {nothing.average_depth, nothing.prompt_depth, nothing.job_depth, nothing.row_depth} == {8.0}
    assert (nothing.layer_ratio, nothing.tokens_per_second) == (1, 0)
    assert {value for name, value in vars(nothing).items() if name != "num_layers"} == {0}
    step = {"seconds": 2.0, "decode_seconds": 1.0, "steps": 10, "layer_steps": 40, "row_layers": 90, "row_steps": 30}
    prompt = {"prompt_positions": 30, "prompt_layer_positions": 180}
    cost = GenerationStats(8, rows=3, tokens=33, peak_kv_bytes=5, **cast(Any, step | prompt))
    assert (cost.average_depth, cost.layer_ratio, cost.row_depth, cost.prompt_depth) == (4, 2, 3, 6)
    assert (cost.job_depth, cost.tokens_per_second) == (220 / 40, 16.5)
    total = GenerationStats(8, peak_kv_bytes=4)
    total += cost
    assert total == cost
    total += GenerationStats(8, rows=1, tokens=3, seconds=1.0, peak_kv_bytes=3)
    assert (total.rows, total.tokens, total.seconds, total.steps, total.peak_kv_bytes) == (4, 36, 3.0, 10, 5)
    assert {"decode_seconds", "peak_kv_bytes"} < {*nothing.summary()} == {*total.summary()}
    assert (
        GenerationStats(8, rows=1, decode_seconds=1.23456, steps=9, layer_steps=64).summary()["decode_seconds"] == 1.235
    )
    assert GenerationStats(8, rows=1, steps=3, layer_steps=7).summary()["layer_ratio"] == 3.429
    unmeasured = GenerationStats(8, rows=3, tokens=7, seconds=1.23456, steps=3, layer_steps=10).summary()
    assert unmeasured == {"rows": 3, "tokens": 7, "seconds": 1.235, "tokens_per_second": 5.7} | {
        "average_depth": 3.33,
        "layer_ratio": 2.4,
    }


def passes_of(model: PreTrainedModel) -> list[int]:
    """Positions of each forward pass over one of its layers, from now on."""
    seen: list[int] = []
    layer = decoder_layers(model)[0]
    layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(_hidden(args, kwargs)), with_kwargs=True)
    return seen


def _hidden(args: Any, kwargs: Any) -> int:
    return int((args[0] if args else kwargs["hidden_states"]).shape[1])


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}, {"prompt_lookup_num_tokens": 5}]
)
def test_steps_are_the_forward_passes_after_the_prompts(loaded: Loaded, options: dict[str, Any]) -> None:
    """C5: whatever the mode of decoding; looking tokens up makes fewer passes, and writes the same text."""
    model, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    seen = passes_of(model)
    common: dict[str, Any] = {"speedup": 1, "max_new_tokens": 40, "min_new_tokens": 40, "batch_size": 1}
    result = skipdecode.generate(model, tokenizer, "the cat the cat the cat", **common | options)
    assert result.stats.steps == len(seen) - 1
    assert result.lengths == [len(seen) - 1]
    assert result.stats.layer_steps == 8 * (len(seen) - 1)
    if "prompt_lookup_num_tokens" in options:
        assert len(seen) < 40
        assert texts(result) == texts(skipdecode.generate(*loaded, "the cat the cat the cat", **common))


@pytest.mark.parametrize("budget", [{"speedup": 1}, {"speedup": 3}])
def test_a_stop_that_is_seen_late_is_no_step(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, budget: dict[str, Any]
) -> None:
    """C17: on MPS transformers makes one pass more and drops its token; texts and costs are those of other devices."""
    options: dict[str, Any] = {"max_new_tokens": 80, "exponential_decay_length_penalty": (4, 9.0)} | budget
    expected = skipdecode.generate(*loaded, TEXTS, **options)

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    def is_supported(device: Any, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        return bool(cache.is_croppable or not cache_is_returned)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(is_supported))
    late = passes_of(model := copy.deepcopy(loaded[0]))
    found = skipdecode.generate(model, loaded[1], TEXTS, **options)
    assert found.completions == expected.completions
    assert found.lengths == expected.lengths
    assert found.stats.layer_steps == expected.stats.layer_steps
    assert len(late) - 1 == found.stats.steps + ("full" in budget or budget["speedup"] == 1)


@pytest.mark.parametrize("kind", [int, list, torch.tensor])
def test_ends_may_be_given_in_every_form_of_transformers(loaded: Loaded, kind: Any) -> None:
    """C20: a number, a list or a tensor."""
    free = skipdecode.generate(*loaded, TEXTS, full=True, max_new_tokens=12, eos_token_id=-1)
    tokens = loaded[0].generate(**loaded[1](TEXTS[0], return_tensors="pt"), max_new_tokens=12, eos_token_id=-1)
    end = int(tokens[0, -3])
    given = kind(end) if kind is int else kind([end])
    rows = skipdecode.generate(*loaded, TEXTS[:1], full=True, max_new_tokens=12, eos_token_id=given).completions
    assert rows[0].finish_reason == "stop"
    assert rows[0].tokens <= 10
    assert free.completions[0].text.startswith(rows[0].text)


# --- schedules


def test_a_schedule_may_be_a_file(loaded: Loaded, tmp_path: Path) -> None:
    """F10: as on the command line."""
    path = tmp_path / "plan.json"
    Schedule.from_depths(8, [5, 3, 2]).save(path)
    for schedule in (path, str(path)):
        options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4}
        assert skipdecode.generate(*loaded, TEXTS[:2], schedule=schedule, **options).stats.layer_steps == 5 + 3 + 2


def test_a_caches_name_in_the_checkpoint_stops_nobody(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """G: we bring the cache; what generation_config.json says of one is for others."""
    model, tokenizer = loaded
    plain = skipdecode.generate(model, tokenizer, TEXTS[:2], speedup=2, max_new_tokens=4)
    monkeypatch.setattr(model.generation_config, "cache_implementation", "static")
    assert texts(skipdecode.generate(model, tokenizer, TEXTS[:2], speedup=2, max_new_tokens=4)) == texts(plain)
    assert skipdecode.generate(model, tokenizer, TEXTS[:2], full=True, max_new_tokens=4).completions
    assert model.generation_config.cache_implementation == "static"


def test_greedy_unless_asked(checkpoint: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """H: one rule for Python and the command line, whatever the checkpoint's generation_config says."""
    model, tokenizer = loaded
    monkeypatch.setattr(model.generation_config, "do_sample", True)
    prompts = ["the cat", "the dog sat"]
    first = texts(skipdecode.generate(model, tokenizer, prompts, speedup=2, max_new_tokens=8))
    assert first == texts(skipdecode.generate(model, tokenizer, prompts, speedup=2, max_new_tokens=8))
    done = run("generate", checkpoint, "--speedup", 2, "--max-new-tokens", 8, stdin="\n".join(prompts).encode())
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == first


# --- where texts end


@pytest.mark.parametrize("pad_is_end", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2, "early_stopping": True}, {"do_sample": True, "seed": 1}])
def test_a_stop_string_ends_a_text(loaded: Loaded, pad_is_end: bool, options: dict[str, Any]) -> None:
    """F10: it works; a row has reason ``stop`` if and only if it holds the string, in its last token, unpadded."""
    model, tokenizer = loaded
    options = {"max_new_tokens": 12, "eos_token_id": -1, "speedup": 2} | options
    if pad_is_end:  # as GPT-2's: padding after a text then looks like an end of its own
        end = tokenizer.eos_token_id
        options |= {"eos_token_id": end, "pad_token_id": end, "min_new_tokens": 12}
    free = skipdecode.generate(model, tokenizer, TEXTS, **options)
    assert {(row.finish_reason, row.tokens) for row in free.completions} == {("length", 12)}
    letters = Counter(
        letter for row in free.completions for letter in row.text if letter.isascii() and letter.isalpha()
    )
    stop = letters.most_common(1)[0][0]
    result = skipdecode.generate(model, tokenizer, TEXTS, stop_strings=[stop], **options)
    longest = max(len(tokenizer.decode([token])) for token in range(len(tokenizer)))
    reasons = set()
    for row, before in zip(result.completions, free.completions, strict=True):
        reasons.add(row.finish_reason)
        assert row.finish_reason == ("stop" if stop in row.text else "length")
        if "num_beams" not in options:
            assert before.text.startswith(row.text)
        if row.finish_reason == "stop":
            assert len(row.text) - row.text.index(stop) <= longest
            assert (row.tokens < 12) == (len(row.text) < len(before.text)) or "num_beams" in options
        else:
            assert row.tokens == 12
    assert "stop" in reasons
    assert result.stats.tokens == sum(row.tokens for row in result.completions)


def forced(tokens: Sequence[int], start: int) -> LogitsProcessorList:
    """Each row writes these tokens after a prompt of ``start``."""

    class Forced(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token = torch.tensor(tokens[input_ids.shape[1] - start])
            return torch.full_like(scores, -torch.inf).index_fill(1, token, 0.0)

    return LogitsProcessorList([Forced()])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stop_string_counts_wherever_it_ends(loaded: Loaded, place: int) -> None:
    """In the first token, in the last one, and between."""
    words = loaded[1](" cat mat log", add_special_tokens=False)["input_ids"]
    assert len(words) == 3
    options: dict[str, Any] = {"max_new_tokens": 3, "logits_processor": forced(words, 3)}
    stop = ["cat", "mat", "log"][place]
    rows, _ = generate_batch(*loaded, [[5, 6, 7]] * 2, None, **options, stop_strings=[stop])
    assert {(row.tokens, row.finish_reason) for row in rows} == {(place + 1, "stop")}


def test_a_text_holds_no_special_tokens(loaded: Loaded) -> None:
    """The end is counted, and not shown."""
    end = loaded[1].eos_token_id
    words = [*loaded[1](" cat mat", add_special_tokens=False)["input_ids"], end]
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": end, "logits_processor": forced(words, 3)}
    rows, _ = generate_batch(*loaded, [[5, 6, 7]] * 2, None, **options)
    assert rows == [Completion("cat mat", 3, "stop")] * 2


def test_padding_after_a_rule_of_the_users_own_is_not_counted(loaded: Loaded) -> None:
    """F10: what ended a row by a ``stopping_criteria`` is not known, but where is."""

    class After(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            rows, width = input_ids.shape
            return torch.tensor([row == 0 and width - start >= 3 for row in range(rows)])

    model, tokenizer = loaded
    start = len(tokenizer("the cat")["input_ids"])
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "stopping_criteria": [After()]}
    rows = skipdecode.generate(model, tokenizer, ["the cat", "the cat"], full=True, **options).completions
    assert [(row.tokens, row.finish_reason) for row in rows] == [(3, "stop"), (6, "length")]


# --- sampling


SAMPLED: dict[str, Any] = {"do_sample": True, "max_new_tokens": 10, "eos_token_id": -1}


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"no_repeat_ngram_size": 1}, {"repetition_penalty": 9.0}])
def test_padding_is_no_text_to_what_looks_back(loaded: Loaded, option: dict[str, Any]) -> None:
    """Even if the padding token is just the one that the row writes: it writes it in a batch too."""
    model, tokenizer = loaded
    plan = Schedule.for_speedup(2, 8, 6, decay="linear")
    long: list[int] = tokenizer(TEXTS[0])["input_ids"]
    short = long[:3]
    same: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1} | option
    alone = generate_ids(model, tokenizer, [short], plan, 1, **same).completions[0]
    first = tokenizer(alone.text)["input_ids"][0]
    together = generate_ids(model, tokenizer, [short, long], plan, 2, pad_token_id=first, **same).completions[0]
    assert together.text == alone.text


@settings(max_examples=6)
@given(st.permutations(range(len(TEXTS))), st.integers(1, 9), st.integers(0, 2**40))
def test_a_rows_sample_depends_on_its_seed_and_number_alone(
    loaded: Loaded, order: list[int], batch_size: int, seed: int
) -> None:
    """F6, B15: not on the batch size, on the neighbours, or on what was drawn before in this process."""
    model, tokenizer = loaded
    torch.manual_seed(batch_size)
    state = torch.get_rng_state()
    options: dict[str, Any] = SAMPLED | {"temperature": 1.5, "top_k": 50, "seed": seed}
    together = texts(skipdecode.generate(model, tokenizer, TEXTS, speedup=2, batch_size=64, **options))
    apart = texts(skipdecode.generate(model, tokenizer, TEXTS, speedup=2, batch_size=batch_size, **options))
    assert together == apart
    assert torch.equal(torch.get_rng_state(), state)
    ids: list[list[int]] = tokenizer(TEXTS)["input_ids"]
    some = {key: ids[key] for key in order[:3]}
    plan = Schedule.for_speedup(2, 8, SAMPLED["max_new_tokens"] - 1, decay="linear")
    for keys, rows, _ in batches(model, tokenizer, some, plan, batch_size, **options):
        assert [row.text for row in rows] == [together[key] for key in keys]


def test_neighbouring_seeds_and_rows_share_no_texts(loaded: Loaded) -> None:
    """F6: one prompt many times: seed 0's row 1 is not seed 1's row 0."""
    prompts = ["the cat"] * 10
    written = [
        text
        for seed in range(4)
        for text in texts(skipdecode.generate(*loaded, prompts, speedup=2, batch_size=1, seed=seed, **SAMPLED))
    ]
    assert len(set(written)) == 40


def test_without_a_seed_the_process_decides(loaded: Loaded) -> None:
    """As in transformers: ``torch.manual_seed`` counts, and a second call draws anew."""
    once = texts(skipdecode.generate(*loaded, TEXTS[:3], speedup=2, **SAMPLED))
    assert texts(skipdecode.generate(*loaded, TEXTS[:3], speedup=2, **SAMPLED)) != once
    torch.manual_seed(0)
    assert texts(skipdecode.generate(*loaded, TEXTS[:3], speedup=2, **SAMPLED)) == once


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 3, "temperature": 2.0}])
def test_samples_follow_the_models_distribution(options: dict[str, Any]) -> None:
    """F6: over many rows, the first token's counts are those of the warped softmax (chi-squared, 5 sigma)."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    skipdecode.attach(model)
    rows = 4000
    prompts = [[1, 2, 3]] * rows

    class Tokenizer:
        pad_token_id = 0

        def decode(self, ids: Sequence[int], **_: object) -> str:
            return " ".join(map(str, ids))

    result = generate_ids(
        model, Tokenizer(), prompts, None, 1000, do_sample=True, max_new_tokens=1, seed=3, pad_token_id=0, **options
    )
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1] / options.get("temperature", 1)
    wanted = logits.softmax(-1)
    if "top_k" in options:
        wanted[wanted < wanted.topk(3).values[-1]] = 0
    if "top_p" in options:
        ranked, index = wanted.sort(descending=True)
        wanted[index[ranked.cumsum(0) - ranked >= 0.8]] = 0
    wanted = wanted / wanted.sum()
    counts = torch.zeros(8)
    for row in result.completions:
        counts[int(row.text)] += 1
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    expected = wanted[possible] * rows
    chi2 = ((counts[possible] - expected) ** 2 / expected).sum().item()
    degrees = int(possible.sum()) - 1
    assert degrees >= 2
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


def test_sampling_ends_after_every_other_warper(loaded: Loaded) -> None:
    """F6: with top-k 1 there is one choice left, and it is the greedy one."""
    greedy = texts(skipdecode.generate(*loaded, TEXTS[:3], speedup=2, max_new_tokens=8))
    options: dict[str, Any] = {"speedup": 2, "max_new_tokens": 8, "do_sample": True, "seed": 5}
    extras: list[dict[str, Any]] = [{"top_k": 1}, {"top_k": 1, "renormalize_logits": True}, {"temperature": 1e-4}]
    for extra in extras:
        assert texts(skipdecode.generate(*loaded, TEXTS[:3], **(options | extra))) == greedy


def test_a_draw_leaves_one_token_and_no_error_hidden() -> None:
    """Its score is 0, all others' are -inf; NaN stays NaN, which model.generate refuses."""
    scores = torch.tensor([[0.5, 2.0, -torch.inf], [1.0, 1.0, 1.0], [torch.nan, 0.0, 0.0]])
    drawn = Sampling(7, [0, 1, 2]).construct_processor(3, "cpu")(torch.zeros(3, 1), scores)
    assert [sorted(row) for row in drawn[:2].tolist()] == [[-torch.inf, -torch.inf, 0.0]] * 2
    assert drawn[2].isnan().any()
    hashes = [stable_hash(i, 3) for i in range(64)]
    assert 2**62 < max(hashes) < 2**63  # as many bits as a seed of torch has
    assert min(hashes) >= 0


def test_sampled_beams_repeat_with_their_batch(loaded: Loaded) -> None:
    """F6: beams draw for the whole batch: the same batch and seed write the same, another seed other texts."""
    options: dict[str, Any] = SAMPLED | {"num_beams": 3, "temperature": 3.0, "speedup": 2, "batch_size": 2}
    state = torch.get_rng_state()
    once = texts(skipdecode.generate(*loaded, TEXTS[:4], seed=0, **options))
    assert torch.equal(torch.get_rng_state(), state)
    assert texts(skipdecode.generate(*loaded, TEXTS[:4], seed=0, **options)) == once
    assert texts(skipdecode.generate(*loaded, TEXTS[:4], seed=1, **options)) != once


def test_a_watermark_and_a_seed_are_not_taken_together(loaded: Loaded) -> None:
    """F6: both want to be the last to touch the scores."""
    with pytest.raises(UsageError, match="watermarking_config"):
        skipdecode.generate(*loaded, "the cat", seed=0, watermarking_config={"bias": 2.0}, **SAMPLED)


# --- what a cache holds


def test_every_state_of_a_cache_is_counted() -> None:
    """Recurrent and convolution states too: hybrids have layers without keys."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
    model = Qwen3NextForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    empty = total_kv_bytes(cache)
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.long), **{CACHE: cache}, use_cache=True)
    keys = 2 * 2 * 5 * 16 * 4 * 2  # two layers; rows, positions, head size, fp32, keys and values
    assert empty == 0
    assert total_kv_bytes(cache) > keys
