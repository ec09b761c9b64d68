"""``skipdecode.generate``: what may be asked, where texts end, how they are sampled, what is counted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import skipdecode
from helpers.tiny import TEXTS, train_tokenizer
from skipdecode import Schedule
from skipdecode.errors import DataError, ModelError, SkipDecodeError, UsageError
from skipdecode.generation.generate import check_options, generate_ids
from skipdecode.generation.stats import Completion, GenerationOutput
from skipdecode.model.config import CONFIG_KEY, set_entry, to_config_entry
from skipdecode.model.inspect import decoder_layers

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKED = [{"role": "user", "content": "the cat"}]
RENDERED = "user: the cat\nassistant: "
NO_END: dict[str, Any] = {"eos_token_id": -1}


@pytest.fixture(scope="module")
def loaded(long_checkpoint: Path) -> Loaded:
    """The tiny model in float32, with 256 positions, and its tokenizer with a chat template."""
    model, tokenizer = skipdecode.load(str(long_checkpoint))
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def texts(result: GenerationOutput) -> list[str]:
    return [completion.text for completion in result.completions]


def write(loaded: Loaded, prompts: Any = TEXTS[:3], speedup: float = 2, new: int = 6, **options: Any) -> list[str]:
    return texts(skipdecode.generate(*loaded, prompts, speedup=speedup, max_new_tokens=new, **options))


def test_a_text_a_conversation_or_a_list_of_either(loaded: Loaded) -> None:
    """Messages are what their template makes of them; left-padded rows are the rows alone."""
    (expected,) = write(loaded, RENDERED)
    (cat,) = write(loaded, "the cat")
    assert write(loaded, ["the cat"]) == [cat]
    assert write(loaded, ASKED) == [expected]
    assert write(loaded, [ASKED, "the cat", RENDERED]) == [expected, cat, expected]
    for words in ("sat", ""):  # an answer that is begun is continued
        begun = [*ASKED, {"role": "assistant", "content": words}]
        assert write(loaded, [begun]) == write(loaded, RENDERED + words)
    assert write(loaded, []) == []


@pytest.mark.parametrize(
    ("prompts", "error", "match"),
    [
        (["the cat", 7], UsageError, "prompt 1 is neither a text nor a list of messages: 7"),
        (["the cat", ["the dog"]], UsageError, "prompt 1 is neither a text nor a list of messages"),
        ([ASKED, [*ASKED, "hi"]], UsageError, "prompt 1 is neither"),
        (["the cat", [{"content": "x"}]], DataError, "message 1 has no role"),
        (["the cat", ""], UsageError, "prompt 1: the prompt has no token"),
        ({"messages": ASKED}, UsageError, "prompts are a text, a list of messages, or a list of either"),
        (None, UsageError, "prompts are a text, a list of messages, or a list of either, not None"),
    ],
)
def test_prompts_that_are_none_are_refused(loaded: Loaded, prompts: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        write(loaded, prompts)


def test_the_last_position_is_taken(loaded: Loaded) -> None:
    """By the longest prompt; one more is refused, however short the others are."""
    prompts = [[5] * 3, [5] * 252]
    assert generate_ids(*loaded, prompts, None, 2, **NO_END, max_new_tokens=4).stats.tokens == 8
    with pytest.raises(UsageError, match="prompt 1: 252 prompt tokens and 5 new ones: the model has 256 positions"):
        generate_ids(*loaded, prompts, None, 2, **NO_END, max_new_tokens=5)


def test_computed_positions_have_no_end() -> None:
    """As in transformers, RoPE goes on beyond the config's positions; a table of positions does not."""
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 320}
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    rope = LlamaConfig(**config, intermediate_size=32, max_position_embeddings=16, eos_token_id=None)
    model = skipdecode.attach(LlamaForCausalLM(rope).eval())
    (row,) = skipdecode.generate(model, tokenizer, TEXTS[0], speedup=2, max_new_tokens=30).completions
    assert row.tokens == 30
    table = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=320)).eval()
    with pytest.raises(UsageError, match="has 16 positions"):
        skipdecode.generate(skipdecode.attach(table), tokenizer, TEXTS[0], speedup=2, max_new_tokens=30)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"schedule": Schedule.full(8)}, "one of speedup and schedule"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"past_key_values": DynamicCache()}, "past_key_values: each batch has a cache of its own"),
        ({"cache": DynamicCache()}, "cache: each batch has a cache of its own"),
        ({"cache_implementation": "static"}, "cache_implementation: each batch has a cache of its own"),
        ({"use_cache": False}, "use_cache=False: each batch has a cache of its own"),
        ({"generation_config": GenerationConfig()}, "generation_config: give its values"),
        ({"guidance_scale": 1.5}, "guidance_scale: it runs the model a second time"),
        ({"max_length": 30}, "max_length: it counts padding.*give max_new_tokens"),
        ({"min_length": 30}, "min_length: it counts padding.*give min_new_tokens"),
        ({"assistant_model": object()}, "assistant_model: what a draft costs"),
        ({"num_beams": 0}, "num_beams is at least 1, not 0"),
        ({"temperature": 0.5}, "temperature.*do_sample"),
        ({"length_penalty": 2.0}, "length_penalty.*num_beams"),
        ({"max_new_tokens": 0}, "max_new_tokens. must be greater than 0"),
        ({"num_beams": "2"}, "num_beams is at least 1, not '2'"),
        ({"batch_size": 0}, "batch_size is at least 1, not 0"),
        ({"do_sample": True, "temperature": 0.0}, "temperature 0: leave do_sample out"),
        ({"stop_strings": ["a", ""]}, "an empty stop string"),
        ({"stop_strings": ""}, "an empty stop string"),
        ({"eos_token_id": "x"}, "data type|type"),
        ({"repetition_penalty": 0.0}, "refuses these options: .*penalty"),
        ({"do_sample": True, "top_k": -1}, "refuses these options: .*top_k"),
        ({"num_beam_groups": 2, "num_beams": 2}, "refuses these options: "),
        ({"penalty_alpha": 0.6, "top_k": 4}, "refuses these options: |do_sample"),
        ({"dola_layers": "low"}, "refuses these options: "),
        ({"no_such_option": 1}, "refuses these options: .*no_such_option"),
    ],
)
def test_options_that_would_be_wrong_without_a_word_are_refused(loaded: Loaded, options: Any, match: str) -> None:
    with pytest.raises(SkipDecodeError, match=match):
        skipdecode.generate(*loaded, "the cat", speedup=2, **options)


def test_a_checkpoint_may_not_ask_for_what_a_call_may_not() -> None:
    """An option takes it back; what a checkpoint says of caches is set aside."""
    for asked in ({"guidance_scale": 2.0}, {"min_length": 5}):
        with pytest.raises(UsageError, match=next(iter(asked))):
            check_options({}, GenerationConfig(**asked))
        check_options(dict.fromkeys(asked, 1), GenerationConfig(**asked))
    with pytest.raises(UsageError, match="is_assistant"):
        check_options({}, GenerationConfig(is_assistant=True))
    check_options({}, GenerationConfig(guidance_scale=1.0, cache_implementation="static", max_length=99))


@pytest.mark.parametrize("asked", [{"repetition_penalty": 0.0}, {"penalty_alpha": 0.6, "top_k": 4}])
def test_what_transformers_refuses_of_a_checkpoint_is_an_error(
    loaded: Loaded, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in asked.items():
        monkeypatch.setattr(loaded[0].generation_config, name, value, raising=False)
    with pytest.raises(UsageError, match="refuses these options"):
        write(loaded)


def test_a_token_without_an_embedding_is_refused(loaded: Loaded) -> None:
    size = loaded[0].config.vocab_size
    with pytest.raises(UsageError, match=f"prompt 1: the prompt has the token {size}: .* embeddings of {size}"):
        generate_ids(*loaded, [[5], [size]], None, 2, max_new_tokens=2)


def test_a_seed_may_be_any_number(loaded: Loaded) -> None:
    assert write(loaded, do_sample=True, seed=2**70 + 3) == write(loaded, do_sample=True, seed=3)


def test_none_is_not_given(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that ask for nothing change nothing; nor does a checkpoint that samples, or names a cache."""
    plain = write(loaded)
    nothing: dict[str, Any] = {"past_key_values": None, "stop_strings": None, "temperature": None, "seed": None}
    flags: dict[str, Any] = {"output_scores": False, "use_cache": True, "num_return_sequences": 1, "num_beams": 1}
    assert write(loaded, **nothing, **flags) == plain
    for name, value in {"cache_implementation": "static", "do_sample": True, "temperature": 5.0}.items():
        monkeypatch.setattr(loaded[0].generation_config, name, value)
    assert write(loaded) == plain
    assert write(loaded, speedup=1)


def test_as_many_tokens_as_transformers_writes(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how many: the checkpoint's new tokens, else 20."""
    assert skipdecode.generate(*loaded, "the cat", **NO_END).completions[0].tokens == 20
    monkeypatch.setattr(loaded[0].generation_config, "max_new_tokens", 7)
    assert skipdecode.generate(*loaded, "the cat", **NO_END).completions[0].tokens == 7


def test_a_padding_token_needs_no_embedding(loaded: Loaded) -> None:
    """Padding is masked, so any token will do; also where no token ends a text."""
    model, tokenizer = copy.deepcopy(loaded[0]), copy.deepcopy(loaded[1])
    prompts = [*TEXTS[:2], "the cat"]
    expected = write(loaded, prompts, **NO_END)
    stopped = write(loaded, prompts, stop_strings=["a"], new=20)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id >= model.config.vocab_size
    assert write((model, tokenizer), prompts, stop_strings=["a"], new=20) == stopped
    tokenizer.pad_token = None
    model.generation_config.pad_token_id = -1
    assert write((model, tokenizer), prompts, stop_strings=["a"], new=20) == stopped
    model.generation_config.pad_token_id = None
    for ends in (model.generation_config.eos_token_id, None):
        model.generation_config.eos_token_id = ends
        assert write((model, tokenizer), prompts, **NO_END) == expected


@pytest.mark.parametrize("option", [{"no_repeat_ngram_size": 1}, {"repetition_penalty": 9.0}])
def test_padding_is_no_text_to_what_looks_back(loaded: Loaded, option: dict[str, Any]) -> None:
    """A row writes in a batch what it writes alone."""
    long: list[int] = loaded[1](TEXTS[0])["input_ids"]
    schedule = Schedule.for_speedup(2, 8)
    same: dict[str, Any] = {"max_new_tokens": 6, **NO_END} | option
    (alone,) = generate_ids(*loaded, [long[:3]], schedule, 1, **same).completions
    for pad in loaded[1](alone.text)["input_ids"]:
        together = generate_ids(*loaded, [long[:3], long], schedule, 2, pad_token_id=pad, **same)
        assert together.completions[0] == alone


def test_one_speed_is_chosen(loaded: Loaded, tmp_path: Path) -> None:
    """1x is the full model; without a speed, the slowest trained one above 1 runs; a schedule may be a file."""
    model, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4}
    steps = 3
    assert skipdecode.generate(model, tokenizer, TEXTS[:2], **options).stats.layer_steps == 8 * steps
    flat = {speedup: Schedule(8, depth, depth, 1) for speedup, depth in ((1.0, 8), (2.0, 4), (4.0, 2))}
    set_entry(model.config, to_config_entry(flat))
    assert hasattr(model.config, CONFIG_KEY)
    depths = {None: 4, 1: 8, 2: 4, 4: 2}
    for speedup, depth in depths.items():
        result = skipdecode.generate(model, tokenizer, TEXTS[:2], speedup=speedup, **options)
        assert result.stats.layer_steps == depth * steps
    path = tmp_path / "schedule.json"
    Schedule.from_depths(8, [5, 3, 2]).save(path)
    for schedule in (path, str(path), Schedule.load(path)):
        assert skipdecode.generate(model, tokenizer, TEXTS[:2], schedule=schedule, **options).stats.layer_steps == 10


def test_1x_is_transformers_own(loaded: Loaded) -> None:
    """Token for token, in left-padded batches."""
    model, tokenizer = loaded
    inputs = tokenizer(TEXTS[:3], return_tensors="pt", padding=True)
    own = model.generate(**inputs, max_new_tokens=9, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    written = skipdecode.generate(model, tokenizer, TEXTS[:3], speedup=1, max_new_tokens=9)
    assert [tokenizer.encode(text) for text in texts(written)] == [
        tokenizer.encode(text) for text in tokenizer.batch_decode(own, skip_special_tokens=True)
    ]


@pytest.mark.parametrize(
    ("step", "options"), [(0, {}), (1, {"do_sample": True, "top_k": 3}), (2, {"num_beams": 2}), (5, {})]
)
@pytest.mark.parametrize("speedup", [1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_at_every_step(
    loaded: Loaded, step: int, options: dict[str, Any], speedup: float, bad: float
) -> None:
    """Greedy decoding would write the first token of the vocabulary."""
    model = copy.deepcopy(loaded[0])
    passes: list[int] = []

    def break_logits(module: Any, args: Any, output: Any) -> None:
        if len(passes) >= step:
            output.logits[-1, -1, 7] = bad
        passes.append(1)

    model.register_forward_hook(break_logits)
    with pytest.raises(ModelError, match="logits are NaN"):
        write((model, loaded[1]), new=8, speedup=speedup, **NO_END, **options)
    assert len(passes) == step + 1


class Writes(LogitsProcessor):
    """Every row writes these tokens after a prompt of ``start``."""

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self.tokens = tokens
        self.start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = torch.tensor(self.tokens[input_ids.shape[1] - self.start])
        return torch.full_like(scores, -torch.inf).index_fill(1, token, 0.0)


def test_a_text_comes_as_it_was_written(loaded: Loaded) -> None:
    """White space stays; the end is counted, and not shown."""
    end = loaded[1].eos_token_id
    tokens = [*loaded[1]("\n  cat \n", add_special_tokens=False)["input_ids"], end]
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": end, "logits_processor": [Writes(tokens, 3)]}
    rows = generate_ids(*loaded, [[5, 6, 7]] * 2, None, 2, **options).completions
    assert rows == [Completion("\n  cat \n", len(tokens), "stop")] * 2


@pytest.mark.parametrize("kind", [int, list, torch.tensor])
def test_ends_may_be_given_in_every_form_of_transformers(loaded: Loaded, kind: Any) -> None:
    tokens = [9, 8, 10, 11]
    options: dict[str, Any] = {"eos_token_id": kind(10) if kind is int else kind([10, 12]), "max_new_tokens": 4}
    (row,) = generate_ids(*loaded, [[5, 6]], None, 1, logits_processor=[Writes(tokens, 2)], **options).completions
    assert (row.tokens, row.finish_reason) == (3, "stop")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stop_string_counts_wherever_it_ends(loaded: Loaded, place: int) -> None:
    """In the first token, in the last one, and between."""
    words = loaded[1](" cat mat log", add_special_tokens=False)["input_ids"]
    assert len(words) == 3
    options: dict[str, Any] = {"max_new_tokens": 3, "logits_processor": [Writes(words, 3)]}
    stop = ["cat", "mat", "log"][place]
    rows = generate_ids(*loaded, [[5, 6, 7]] * 2, None, 2, stop_strings=[stop], **options).completions
    assert {(row.tokens, row.finish_reason) for row in rows} == {(place + 1, "stop")}


@pytest.mark.parametrize("pad_is_end", [False, True])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}])
def test_a_row_stops_if_and_only_if_it_holds_the_stop_string(
    loaded: Loaded, pad_is_end: bool, options: dict[str, Any]
) -> None:
    """In its last token, and without the padding behind it, even if the padding token is an end too."""
    model, tokenizer = loaded
    options = {"max_new_tokens": 12, "speedup": 2, **NO_END} | options
    if pad_is_end:
        end = tokenizer.eos_token_id
        options |= {"eos_token_id": end, "pad_token_id": end, "min_new_tokens": 12}
    free = skipdecode.generate(model, tokenizer, TEXTS, **options)
    assert {(row.finish_reason, row.tokens) for row in free.completions} == {("length", 12)}
    letters = Counter(letter for text in texts(free) for letter in text if letter.isascii() and letter.isalpha())
    stop = letters.most_common(1)[0][0]
    result = skipdecode.generate(model, tokenizer, TEXTS, stop_strings=[stop], **options)
    longest = max(len(tokenizer.decode([token])) for token in range(len(tokenizer)))
    for row, before in zip(result.completions, free.completions, strict=True):
        assert row.finish_reason == ("stop" if stop in row.text else "length")
        assert before.text.startswith(row.text)
        if row.finish_reason == "stop":
            assert len(row.text) - row.text.index(stop) <= longest
            assert (row.tokens < 12) == (len(row.text) < len(before.text))
    assert {row.finish_reason for row in result.completions} == {"stop", "length"}
    assert result.stats.tokens == sum(row.tokens for row in result.completions)


def test_a_rule_of_the_users_own_ends_its_row(loaded: Loaded) -> None:
    start = len(loaded[1]("the cat")["input_ids"])

    def after_three(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (torch.arange(len(input_ids)) == 0) & (input_ids.shape[1] - start >= 3)

    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "stopping_criteria": [after_three]}
    rows = skipdecode.generate(*loaded, ["the cat", "the cat"], speedup=1, **options).completions
    assert [(row.tokens, row.finish_reason) for row in rows] == [(3, "stop"), (6, "length")]


def test_beams_end_where_their_text_does(loaded: Loaded) -> None:
    """What fills them up behind it is no text of theirs."""
    for tokens, count, reason in (([9, 8, 10, 11], 3, "stop"), ([9, 8, 7, 6], 4, "length")):
        options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4, "eos_token_id": 10}
        options["logits_processor"] = [Writes(tokens, 2)]
        rows = generate_ids(*loaded, [[5, 6]] * 2, None, 2, **options).completions
        assert {(row.tokens, row.finish_reason) for row in rows} == {(count, reason)}


# --- sampling

SAMPLED: dict[str, Any] = {"do_sample": True, **NO_END}


def test_the_same_seed_and_batches_sample_the_same(loaded: Loaded) -> None:
    """Whatever was drawn before; another seed draws other texts, and no seed goes on where torch is."""
    once = write(loaded, seed=5, batch_size=2, **SAMPLED)
    torch.rand(3)
    assert write(loaded, seed=5, batch_size=2, **SAMPLED) == once
    assert write(loaded, seed=6, batch_size=2, **SAMPLED) != once
    torch.manual_seed(0)
    first = write(loaded, **SAMPLED)
    assert write(loaded, **SAMPLED) != first
    torch.manual_seed(0)
    assert write(loaded, **SAMPLED) == first


def test_batches_of_one_prompt_differ(loaded: Loaded) -> None:
    """Each batch has its own random numbers."""
    assert len(set(write(loaded, ["the cat"] * 10, new=10, batch_size=2, seed=0, **SAMPLED))) == 10


def count_passes(model: PreTrainedModel) -> list[int]:
    """Positions of each forward pass over the first layer, from now on."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(int((args[0] if args else kwargs["hidden_states"]).shape[1]))

    decoder_layers(model)[0].register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}, {"prompt_lookup_num_tokens": 5}]
)
def test_steps_are_the_forward_passes_after_the_prompts(loaded: Loaded, options: dict[str, Any]) -> None:
    """Whatever the mode of decoding; prompt lookup makes fewer passes, and writes the same text."""
    model, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    seen = count_passes(model)
    common: dict[str, Any] = {"speedup": 1, "max_new_tokens": 40, "min_new_tokens": 40, "batch_size": 1}
    result = skipdecode.generate(model, tokenizer, "the cat the cat the cat", **common | options)
    assert result.stats.steps == len(seen) - 1
    assert result.lengths == [len(seen) - 1]
    assert result.stats.layer_steps == 8 * (len(seen) - 1)
    if "prompt_lookup_num_tokens" in options:
        assert len(seen) < 40
        assert texts(result) == texts(skipdecode.generate(*loaded, "the cat the cat the cat", **common))


def test_layers_of_prompts_and_steps_are_those_of_the_schedule(loaded: Loaded) -> None:
    """Once a batch, over its width; each batch is told of."""
    schedule = Schedule.from_depths(8, [6, 5, 2], prompt_layers=7)
    prompts = [[5] * 4, [5] * 9, [5] * 6]
    batches: list[Any] = []
    options: dict[str, Any] = {"max_new_tokens": 5, **NO_END}
    result = generate_ids(*loaded, prompts, schedule, 2, on_batch=batches.append, **options)
    assert [batch.rows for batch in batches] == [2, 1]
    assert [batch.layer_steps for batch in batches] == [6 + 5 + 2 + 2] * 2
    assert result.stats.prompt_positions == 9 + 4
    assert result.stats.prompt_layer_positions == 7 * (9 + 4)
    assert result.lengths == [4, 4]
    assert all(0 < batch.decode_seconds < batch.seconds for batch in batches)
