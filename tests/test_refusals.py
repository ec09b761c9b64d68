"""What cannot be right is an error that says what to do; never silently wrong text."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ZayaConfig,
)
from transformers.generation import utils as generation

from helpers.families import LAYERS, NEW, TOP, WIDTH, build, distance, positions, prompts, row, run, uncached
from skipdecode import Schedule, ScheduleError, SkipCache, attach, teacher_forced
from skipdecode.errors import CacheError, UnsupportedModel, UsageError
from skipdecode.model.cache_name import CACHE

FULL = Schedule.full(LAYERS)
FAMILIES = pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "gemma3"])


@pytest.fixture
def model() -> PreTrainedModel:
    """Any attached model."""
    return attach(build("llama"))


# --- going deeper again


@FAMILIES
@pytest.mark.parametrize("new", [2, 4, WIDTH, NEW])
def test_a_used_cache_is_refused(name: str, new: int) -> None:
    """The same prompt again, whatever number of columns ``generate`` makes of it (with WIDTH new tokens just one)."""
    model, inputs = attach(build(name)), prompts()
    cache = SkipCache(model, TOP)
    run(model, inputs, **{CACHE: cache}, max_new_tokens=new)
    with pytest.raises(RuntimeError, match="new SkipCache"):
        run(model, inputs, **{CACHE: cache}, max_new_tokens=new)


@pytest.mark.parametrize("width", [0, 2, 5])
def test_only_one_column_may_follow_the_prompt(model: PreTrainedModel, width: int) -> None:
    """In loops written by hand too."""
    cache, inputs = SkipCache(model, TOP), prompts((6, 6))
    model(inputs["input_ids"], **{CACHE: cache})
    with pytest.raises(RuntimeError, match=f"{width} new positions.*retired.*new SkipCache"):
        model(inputs["input_ids"][:, :width], **{CACHE: cache})


@FAMILIES
@pytest.mark.parametrize("chunk", [1, 4, WIDTH - 1])
def test_chunked_prefill_is_refused(name: str, chunk: int) -> None:
    """Chunks hide where the prompt ends; a last chunk of one column would pass for a step."""
    with pytest.raises(RuntimeError, match="chunked prefill"):
        run(build(name), prompts(), TOP, prefill_chunk_size=chunk)


def test_chunked_prefill_in_the_generation_config_is_refused(model: PreTrainedModel) -> None:
    """Said before the prompt is run; the full schedule does not mind."""
    model.generation_config.prefill_chunk_size = 4
    with pytest.raises(ValueError, match="prefill_chunk_size to None"):
        SkipCache(model, TOP)
    SkipCache(model, FULL)


@pytest.mark.parametrize("kind", ["assistant", "prompt-lookup"])
def test_assisted_decoding_is_refused(model: PreTrainedModel, kind: str) -> None:
    """Verification rolls the cache back; with the full schedule it may, and gives the greedy tokens."""
    options = {"assistant_model": build("llama")} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    inputs: dict[str, Any] = row(prompts(), 0)
    with pytest.raises(RuntimeError, match=r"assisted \(speculative\) decoding.*leave SkipCache out"):
        run(model, inputs, TOP, **options)
    assisted = run(model, inputs, FULL, **options)
    assert torch.equal(assisted.sequences, run(model, inputs).sequences)


def test_cropping_is_refused_and_not_advertised(model: PreTrainedModel) -> None:
    """``generate`` asks is_croppable before it plans to roll a step back (as it does on Apple's GPUs)."""
    cache = run(model, prompts(), TOP)[CACHE]
    assert not cache.is_croppable
    assert SkipCache(model, FULL).is_croppable
    with pytest.raises(RuntimeError, match="cannot be cropped"):
        cache.crop(-1)


# --- a cache that holds everything goes on

WHOLE = Schedule(LAYERS, LAYERS, 2, horizon=6)  # its first step runs all layers


@pytest.mark.parametrize("name", ["opt", "llama", "gemma3"])
@pytest.mark.parametrize("read", [[5], [WIDTH - 1], [1, 5]], ids=str)
def test_a_prompt_may_come_in_parts_while_no_layer_is_retired(name: str, read: list[int]) -> None:
    """Of any width, one position too: logits are those of the prompt read at once, and depths begin behind it."""
    model, inputs = attach(build(name)), prompts()
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], SkipCache(model, WHOLE)
    for start, end in pairwise([0, *read]):
        known = {"attention_mask": mask[:, :end], CACHE: cache}
        part = model.prepare_inputs_for_generation(ids[:, start:end], is_first_iteration=True, **known)
        part |= {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, start:end]}
        with torch.no_grad():
            model(**part)
    parts, whole = run(model, inputs, **{CACHE: cache}), run(model, inputs, WHOLE)
    assert torch.equal(parts.sequences, whole.sequences)
    assert distance(torch.stack(parts.logits, 1), torch.stack(whole.logits, 1)) < 1e-5
    assert cache.step_depths == whole[CACHE].step_depths


def test_a_second_turn_may_come_while_no_layer_is_retired(model: PreTrainedModel) -> None:
    """What was written at full depth is prompt to what follows; afterwards, layers are retired and it is refused."""
    plan, inputs = Schedule.from_depths(LAYERS, [LAYERS] * 4 + [3]), prompts()
    cache = SkipCache(model, plan)
    first = run(model, inputs, **{CACHE: cache}, max_new_tokens=3).sequences
    turn = torch.cat([first, first[:, :4]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(turn[:, :7])], dim=1)
    inputs = {"input_ids": turn, "attention_mask": mask}
    again = run(model, inputs, **{CACHE: cache})
    assert torch.equal(again.sequences, run(model, inputs, plan).sequences)
    assert cache.step_depths == [8, 8] + [plan.depth(step) for step in range(NEW - 1)]
    with pytest.raises(CacheError, match="retired"):
        run(model, inputs, **{CACHE: cache})


@pytest.mark.parametrize(
    ("name", "plan"),
    [("jamba", WHOLE), ("llama", WHOLE.replace(max_depth=7)), ("llama", TOP.replace(prompt_decay=3))],
    ids=["recurrent", "retired", "decay-in-the-prompt"],
)
def test_a_prompt_in_parts_is_refused_where_it_is_not_exact(name: str, plan: Schedule) -> None:
    """States that transformers does not go on from, layers that are gone."""
    model, inputs = attach(build(name)), prompts((6, 6))
    cache = SkipCache(model, plan)
    model(inputs["input_ids"][:, :4], **{CACHE: cache})
    with pytest.raises(CacheError, match=r"retired, or hold a recurrent state.*new SkipCache"):
        model(inputs["input_ids"][:, 4:], **{CACHE: cache})


@pytest.mark.parametrize("returned", [True, False])
def test_a_step_that_mps_runs_too_many_changes_nothing(returned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Apple's GPUs ``generate`` learns a step late that all rows have ended; simulated on a CPU."""
    monkeypatch.setattr(
        generation.DeferredStopCheck,
        "is_supported",
        lambda device, cache, is_returned, is_assistant: cache is None or cache.is_croppable or not is_returned,
    )
    # A CPU has no events: what is copied there is there.
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda *args, **kwargs: event)
    for plan in (TOP, FULL):
        model, cpu = attach(build("llama")), run(build("llama"), prompts(), plan).sequences
        ends = cpu[:, WIDTH + 4].tolist()
        options: dict[str, Any] = {"eos_token_id": ends, "return_dict_in_generate": returned, "output_logits": returned}
        found = run(model, prompts(), plan, **options)
        tokens = (found.sequences if returned else found)[:, WIDTH:].tolist()
        for row_tokens, free in zip(tokens, cpu[:, WIDTH:].tolist(), strict=True):
            length = next(n for n, token in enumerate(free, 1) if token in ends)
            assert row_tokens[:length] == free[:length]
            assert set(row_tokens[length:]) <= {0}


# --- caches in a teacher-forced pass


@FAMILIES
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


# --- batches without a column prefix


@pytest.mark.filterwarnings("ignore")
def test_continuous_batching_is_stock_or_refused(model: PreTrainedModel) -> None:
    """transformers' own: with gates alone the stock model's tokens; with a schedule, that it cannot be followed."""
    texts = [[5, 6, 7, 8], [9, 10, 11], [3, 4]]
    options = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)  # not most of the machine's memory
    found = model.generate_batch(texts, generation_config=options, continuous_batching_config=small)
    stock = build("llama")
    for text, name in zip(texts, sorted(found), strict=True):
        assert found[name].generated_tokens == stock.generate(torch.tensor([text]), options)[0, len(text) :].tolist()
    attach(model, TOP)
    with pytest.raises(UsageError, match=r"continuous batching.*skipdecode serve"):
        model.generate_batch(texts, generation_config=options, continuous_batching_config=small)


@pytest.mark.parametrize("name", ["opt", "gpt2", "gpt-neox", "llama", "gemma3", "phi"])
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_positions_are_refused(name: str, rows: int) -> None:
    """Position ids that restart within a row: several sequences in one."""
    model, length = attach(build(name)), 10
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]] * rows)
    ids = torch.randint(2, 128, (rows, length))
    with teacher_forced(model, TOP, 4), pytest.raises(ValueError, match=r"packed.*one sequence per row"):
        model(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match=r"packed.*one sequence per row"):
        model(ids, position_ids=packed, **{CACHE: SkipCache(model, TOP)})
    model(ids, position_ids=packed, use_cache=False)  # the gates alone refuse nothing


def test_a_pass_of_nothing_is_refused_in_the_models_own_words(model: PreTrainedModel) -> None:
    """Neither ids nor embeddings."""
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(**{CACHE: SkipCache(model, TOP)})


def test_packed_sequence_lengths_are_refused(model: PreTrainedModel) -> None:
    """The lengths that flash attention takes say the same."""
    lengths = torch.tensor([0, 4, 10], dtype=torch.int32)
    with teacher_forced(model, TOP, 4), pytest.raises(ValueError, match="packed"):
        model(torch.randint(2, 128, (1, 10)), cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, use_cache=False)


def test_padding_is_not_taken_for_packing(model: PreTrainedModel) -> None:
    """Left-padded prompts and right-padded responses restart at 0 as well, but hold one sequence."""
    for mask in (
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1],
    ):
        rows = torch.tensor([mask])
        uncached(model, TOP, torch.randint(2, 128, (1, 8)), rows)


# --- a model or schedule that does not fit


def test_encoder_decoder_models_are_refused() -> None:
    """Only decoder-only causal LMs have one stack to skip in."""
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4)
    with pytest.raises(ValueError, match=r"encoder-decoder.*decoder-only"):
        attach(T5ForConditionalGeneration(config))


@pytest.mark.parametrize("forced", [False, True])
def test_a_state_that_layers_hand_on_is_refused(forced: bool) -> None:
    """Zaya's layers give the next one their router's state, which a skipped layer does not have."""
    config = ZayaConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        layer_types=["hybrid"] * LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        router_hidden_size=16,
    )
    model, inputs = attach(AutoModelForCausalLM.from_config(config).eval()), prompts()
    held = teacher_forced(model, TOP, WIDTH) if forced else nullcontext()
    call = partial(model, **inputs, use_cache=False) if forced else partial(run, model, inputs, TOP)
    with held, pytest.raises(UnsupportedModel, match="hands the next one more than hidden states"):
        call()


def test_a_module_that_is_no_language_model_is_refused() -> None:
    """Without a config there is nothing to go by."""
    with pytest.raises(ValueError, match=r"no config.*causal LMs"):
        attach(torch.nn.Linear(2, 2))


def test_a_schedule_for_another_depth_is_refused(model: PreTrainedModel) -> None:
    """By the cache and by teacher forcing, with both numbers."""
    wrong = Schedule(LAYERS + 1, 4, 2, horizon=4)
    with pytest.raises(ScheduleError, match="for 9 layers, the model has 8"):
        SkipCache(model, wrong)
    with pytest.raises(ScheduleError, match="for 9 layers, the model has 8"), teacher_forced(model, wrong, 2):
        pass


def test_no_schedule_at_all_is_refused(model: PreTrainedModel) -> None:
    """Neither given nor in the model's config."""
    with pytest.raises(ScheduleError, match="no schedule"):
        SkipCache(model)


@pytest.mark.parametrize("name", ["opt", "gpt2", "gpt-neox", "llama", "gemma3"])
def test_a_model_without_gates_is_refused(name: str) -> None:
    """A SkipCache, or teacher forcing, on a model that was never attached."""
    model = build(name)
    with pytest.raises(RuntimeError, match=r"skipdecode\.attach\(model\)"):
        model.generate(**prompts(), **{CACHE: SkipCache(model, TOP)}, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"skipdecode\.attach\(model\)"), teacher_forced(model, TOP, 2):
        pass
