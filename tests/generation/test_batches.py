"""Which prompts share a batch: those of like length, with positions and memory for all."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

import skipdecode
from helpers.families import FAMILIES, FORMS, build
from helpers.tiny import TEXTS, train_tokenizer
from skipdecode import Schedule
from skipdecode.errors import UsageError
from skipdecode.generation import generate as generation
from skipdecode.generation.batches import SHARE, row_size, split_batches
from skipdecode.generation.generate import generate_ids

NO_END: dict[str, Any] = {"eos_token_id": -1}


def batches_of(
    lengths: list[int], batch_size: int, new: float = 128, config: Any = None, room: float = math.inf
) -> list[list[int]]:
    """The prompts' lengths in each batch."""
    config = config or LlamaConfig()
    batches = split_batches(config, [[0] * length for length in lengths], batch_size, new, room)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    return [[lengths[i] for i in batch] for batch in batches]


@given(st.lists(st.integers(1, 2000), max_size=30), st.integers(1, 9), st.integers(1, 99))
def test_batches_hold_prompts_of_like_length_longest_first(lengths: list[int], batch_size: int, new: int) -> None:
    batches = batches_of(lengths, batch_size, new)
    assert [length for batch in batches for length in batch] == sorted(lengths, reverse=True)
    assert all(len(batch) <= batch_size for batch in batches)
    assert all(len(batch) == batch_size for batch in batches_of(lengths, batch_size, math.inf)[:-1])


@pytest.mark.parametrize("new", [4, 128])
def test_long_prompts_do_not_widen_the_batches_of_short_ones(new: int) -> None:
    """Two hundred rows of 5 to 500 tokens and three of 3,000; prompts of like length stay in full batches."""
    lengths = [5 + 495 * i // 199 for i in range(200)] + [3000] * 3
    batches = batches_of(lengths, 32, new)
    assert sum(len(batch) * batch[0] for batch in batches) < 1.3 * sum(lengths)
    assert batches[0] == [3000] * 3
    assert [len(batch) for batch in batches_of([20, 25, 30, 22] * 16, 32, new)] == [32, 32]


def peak_of(model: Any, prompts: list[list[int]], new: int) -> int:
    """Most bytes that one batch allocates at once, beyond what was there before."""
    tokenizer = train_tokenizer(TEXTS, 128)
    generate_ids(model, tokenizer, prompts[:1], None, 1, **NO_END, max_new_tokens=2)  # what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        generate_ids(model, tokenizer, prompts, None, len(prompts), **NO_END, max_new_tokens=new)
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FORMS)
def test_a_batch_takes_no_more_memory_than_was_foreseen(name: str, attention: str) -> None:
    model = build(name)
    model.set_attn_implementation(attention)
    prompts = [[5] * length for length in (60, 9, 33, 60)]
    foreseen = len(prompts) * row_size(model.config, 60 + 4) * model.dtype.itemsize / SHARE
    assert 0 < peak_of(skipdecode.attach(model), prompts, 4) < foreseen


def test_rows_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches grow as rows get shorter; the longest row runs whatever is free."""
    config, lengths = LlamaConfig(), [4000, *[400] * 9, *[100] * 40]
    room = 4 * row_size(config, 428) / SHARE
    sizes = [(len(batch), batch[0]) for batch in batches_of(lengths, 32, 28, config, room)]
    assert sizes[0] == (1, 4000)
    assert all(size * row_size(config, longest + 28) <= SHARE * room for size, longest in sizes[1:])
    assert [size for size, _ in sizes[1:3]] == [4, 4]
    assert max(size for size, longest in sizes if longest == 100) > 4
    model, tokenizer = skipdecode.attach(build("llama")), train_tokenizer(TEXTS, 128)
    prompts = [[5] * 9] * 6
    whole = generate_ids(model, tokenizer, prompts, None, 6, max_new_tokens=4)
    monkeypatch.setattr(generation, "free_memory", lambda _: 2 * row_size(model.config, 13) * 4 / SHARE)
    split = generate_ids(model, tokenizer, prompts, None, 6, max_new_tokens=4)
    assert (len(whole.lengths), len(split.lengths)) == (1, 3)
    assert split.completions == whole.completions


def test_no_batch_lies_on_both_sides_of_a_change_of_rotary_embeddings() -> None:
    """Its longest row decides for all; and no text crosses, since the keys before would be those of the other side."""
    config_class, options = FAMILIES["phi3-sliding"]
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 16
    phi3 = config_class(**options | {"original_max_position_embeddings": 16, "rope_parameters": rope})
    assert batches_of([16, 17, 9, 20], 4, config=phi3) == [[20, 17], [16, 9]]
    model, tokenizer = skipdecode.attach(AutoModelForCausalLM.from_config(phi3).eval()), train_tokenizer(TEXTS, 128)
    prompts = [[5] * length for length in (20, 17, 11, 4)]
    for decoding in (None, Schedule.for_speedup(2, 8)):
        together = generate_ids(model, tokenizer, prompts, decoding, 4, **NO_END, max_new_tokens=6)
        alone = generate_ids(model, tokenizer, prompts, decoding, 1, **NO_END, max_new_tokens=6)
        assert together.completions == alone.completions
        assert together.stats.peak_kv_bytes > alone.stats.peak_kv_bytes > 0
    with pytest.raises(UsageError, match="prompt 0: 11 prompt tokens and 7 new ones: long RoPE"):
        generate_ids(model, tokenizer, [[5] * 11], None, 4, **NO_END, max_new_tokens=7)
