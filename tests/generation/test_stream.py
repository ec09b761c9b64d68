"""Token streams and kept prompts: what ``generate`` generates, a token at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from skipdecode import Schedule, load
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import ModelError
from skipdecode.generation.generate import generate_ids
from skipdecode.generation.stream import CHAT_SAMPLING, PromptCache, TokenStream, sampling_defaults

PROMPT = "name Zizzi, food English, area riverside ->"
SCHEDULES = [Schedule.full(24), Schedule.for_speedup(3, 24), Schedule(24, 16, 8, 12, prompt_layers=20, prompt_decay=3)]


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load("demo", dtype="float32")


def stream(demo: tuple[Any, Any], schedule: Schedule, new: int = 16, **options: Any) -> TokenStream:
    model, tokenizer = demo
    (ids,) = encode_prompts(tokenizer, [PROMPT])
    made = TokenStream(model, ids, schedule, **options)
    while not made.done and len(made.tokens) < new:
        made.step()
    return made


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_greedy_stream_is_what_generate_generates(demo: tuple[Any, Any], schedule: Schedule) -> None:
    model, tokenizer = demo
    ids = encode_prompts(tokenizer, [PROMPT])
    expected = generate_ids(model, tokenizer, ids, schedule, 1, max_new_tokens=16).completions[0].text
    made = stream(demo, schedule)
    assert tokenizer.decode(made.tokens, skip_special_tokens=True) == expected
    assert made.cache.step_depths == [schedule.depth(g) for g in range(len(made.tokens) - 1)]


def test_random_numbers_are_the_same_at_every_call(demo: tuple[Any, Any]) -> None:
    once, again = (stream(demo, SCHEDULES[1], sampling={"temperature": 1.5}) for _ in range(2))
    other = stream(demo, SCHEDULES[1], sampling={"temperature": 1.5}, seed=1)
    assert once.tokens == again.tokens != other.tokens


def test_nan_never_becomes_a_token(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = demo
    (ids,) = encode_prompts(tokenizer, [PROMPT])
    made = TokenStream(model, ids, SCHEDULES[1])
    made.step()
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: output * torch.nan)
    with pytest.raises(ModelError, match="NaN"):
        made.step()
    handle.remove()
    assert len(made.tokens) == 1


@pytest.mark.parametrize("schedule", SCHEDULES[:2])
def test_a_kept_prompt_changes_no_output(demo: tuple[Any, Any], schedule: Schedule) -> None:
    """Prompts that grow, differ in the middle, or are shorter than the one before."""
    model, tokenizer = demo
    texts = ["name Zizzi, food English", PROMPT, PROMPT + " Zizzi is", "name Zizzi, area city centre ->", "name"]
    prompts = PromptCache(model)
    for text in texts:
        (ids,) = encode_prompts(tokenizer, [text])
        if len(ids) < 2:
            continue
        kept = TokenStream(model, ids, schedule, prefix=prompts.prefix(ids, schedule))
        fresh = TokenStream(model, ids, schedule)
        for _ in range(4):
            assert kept.step() == fresh.step()


def test_a_kept_prompt_computes_only_what_is_new(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    widths: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda m, args: widths.append(args[0].shape[1]))
    prompts = PromptCache(model)
    lengths = [0]
    for text in ("name Zizzi, food English", PROMPT, PROMPT + " Zizzi is a"):
        (ids,) = encode_prompts(tokenizer, [text])
        prompts.prefix(ids, SCHEDULES[1])
        lengths.append(len(ids) - 1)
    hook.remove()
    assert sum(widths) <= lengths[-1] + len(widths)
    assert all(width <= after - before + 2 for width, (before, after) in zip(widths, pairwise(lengths), strict=True))


def test_schedules_that_skip_in_the_prompt_start_anew(demo: tuple[Any, Any]) -> None:
    (ids,) = encode_prompts(demo[1], [PROMPT])
    assert PromptCache(demo[0]).prefix(ids, SCHEDULES[2]) is None


def test_a_checkpoint_that_samples_keeps_its_own_options(demo: tuple[Any, Any]) -> None:
    config = demo[0].generation_config
    assert sampling_defaults(config) == CHAT_SAMPLING
    sampling = type(config)(do_sample=True, temperature=0.6, top_p=0.95)
    found = sampling_defaults(sampling)
    assert (found["temperature"], found["top_p"]) == (0.6, 0.95)
