"""Generate texts for prompts with ``model.generate``, in batches of similar length, and count their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat import Message, Prompt, parse_messages
from ..data.rows import is_text
from ..data.tokenize import encode_prompts
from ..errors import DataError, UsageError
from ..model.config import num_layers, trained_schedules
from ..model.inspect import text_config
from ..schedule import Schedule, choose_schedule
from .batch import Decoding, generate_batch
from .options import check_options, check_with_model, given, given_schedule, max_new_tokens, num_beams
from .sampling import Sampling, stable_hash
from .stats import Completion, GenerationOutput, GenerationStats


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompt | Iterable[Any],
    *,
    speedup: float | None = None,
    schedule: Schedule | str | Path | None = None,
    batch_size: int = 32,
    seed: int | None = None,
    **options: Any,
) -> GenerationOutput:
    """Generate a text for each prompt.

    Args:
        prompts: a text, a conversation (a list of ``{"role": …, "content": …}``), or a list of either. The tokenizer's
            chat template is applied to conversations; a last message of the assistant is continued. Batches hold
            prompts of similar length; completions are returned in the order of ``prompts``.
        speedup: target layer reduction; 1 runs the unmodified model. Without it and ``schedule``: the schedule of the
            model's config.
        schedule: a schedule or its file, in the place of ``speedup``.
        batch_size: prompts per ``model.generate`` call.
        seed: for sampling; a text depends on the seed and the prompt's index, not on its batch (but on the whole batch
            in beam search). None: torch's global generator.
        options: options of ``model.generate`` (``max_new_tokens``, ``do_sample``, ``num_beams``, …); None: not given.
            Decoding is greedy unless ``do_sample`` is given, whatever the checkpoint's generation_config says.

    Raises:
        ScheduleError: the schedule does not fit the model.
        UsageError: there are no prompts; a prompt is neither text nor conversation, has no token, or needs, with
            ``max_new_tokens``, more positions than the model has; or an option is not supported.

    Example:
        >>> model, tokenizer = skipdecode.load("demo")
        >>> result = skipdecode.generate(model, tokenizer, ["name Aromi, food English ->"], speedup=3)
        >>> result.completions[0].text, result.stats.layer_ratio
    """
    texts = to_prompts(prompts)
    check_options(options, batch_size, seed)
    schedule = given_schedule(speedup, schedule)
    decoding = None
    if speedup != 1:
        decoding = schedule or choose_schedule(trained_schedules(model), num_layers(model.config), speedup)
    return generate_ids(model, tokenizer, encode_prompts(tokenizer, texts), decoding, batch_size, seed=seed, **options)


def to_prompts(given: Any) -> list[Prompt]:
    """Return a list of prompts from one text or conversation, or several. Raises UsageError for anything else."""
    if isinstance(given, str) or _is_conversation(given):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, (Mapping, bytes)):
        raise UsageError(f"prompts are texts or lists of messages, one or several, not {type(given).__name__}")
    prompts: list[Prompt] = []
    for number, prompt in enumerate(given):
        if _is_conversation(prompt):
            try:
                prompt = parse_messages(prompt)
            except DataError as error:
                raise UsageError(f"prompt {number}: {error}") from None
        elif not isinstance(prompt, str):
            raise UsageError(f"prompt {number} is neither a text nor a list of messages: {prompt!r}")
        if not all(map(is_text, [prompt] if isinstance(prompt, str) else [each.content for each in prompt])):
            raise UsageError(f"prompt {number} holds a lone surrogate, which no tokenizer knows: {prompt!r}")
        prompts.append(prompt)
    if not prompts:
        raise UsageError("no prompts were given")
    return prompts


def _is_conversation(value: Any) -> bool:
    """Return whether ``value`` is a list of messages, as chat templates take them."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, (Mapping, Message)) for m in value)


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    batch_size: int,
    on_batch: Callable[[GenerationStats], object] = lambda cost: None,
    seed: int | None = None,
    **options: Any,
) -> GenerationOutput:
    """Generate a text for each token-id prompt, and call ``on_batch`` with the cost of each batch.

    Args:
        decoding: a schedule, None for the unmodified model, or a function that makes each batch's cache.
        batch_size, seed, options: as :func:`generate` takes them.

    Raises:
        UsageError: a prompt is empty or too long for the model, or an option is not supported.
    """
    empty = next((number for number, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise UsageError(f"prompt {empty} has no token to go on from: the tokenizer puts none at the beginning")
    room = position_limit(model.config)
    longest = max(map(len, prompts), default=0) + max_new_tokens(options, model.generation_config)
    if room is not None and longest > room:
        raise UsageError(f"the longest prompt and max_new_tokens need {longest} positions, the model has {room}")
    result = GenerationOutput(GenerationStats(num_layers(model.config)))
    rows: dict[int, Completion] = {}
    numbered = dict(enumerate(prompts))
    for keys, batch, cost in batches(model, tokenizer, numbered, decoding, batch_size, seed, **options):
        rows.update(zip(keys, batch, strict=True))
        result.stats += cost
        result.lengths.append(cost.steps)
        on_batch(cost)
    result.completions = [rows[i] for i in range(len(prompts))]
    return result


def batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, list[int]],
    decoding: Decoding,
    batch_size: int,
    seed: int | None = None,
    **options: Any,
) -> Iterator[tuple[list[int], list[Completion], GenerationStats]]:
    """Generate token-id ``prompts`` batch by batch; :func:`generate_ids` explains the arguments.

    Yields:
        The keys, completions and cost of a batch. With a ``seed``, a key samples the same text in every run.
    """
    defaults, options = model.generation_config, given(options)
    check_options(options, batch_size, seed)
    check_with_model(options, defaults, seed)
    order = sorted(prompts, key=lambda key: (-len(prompts[key]), key))  # what does not fit in memory fails at once
    seed = seed if options.get("do_sample") else None  # greedy decoding draws nothing
    devices = [model.device] if model.device.type == "cuda" else []  # besides the CPU, whose state is always restored
    for at in range(0, len(order), batch_size):
        keys = order[at : at + batch_size]
        draws: dict[str, Any] = {}
        if seed is not None and num_beams(options, defaults) == 1:  # beam search draws for a whole batch
            draws = {"watermarking_config": Sampling(seed, keys)}
        with torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(stable_hash(seed, *keys))
            here = [prompts[key] for key in keys]
            rows, cost = generate_batch(model, tokenizer, here, decoding, **options | draws)
        yield keys, rows, cost


def max_positions(config: Any) -> int | None:
    """Return the number of positions that the model was trained for; None if its config does not say."""
    return getattr(text_config(config), "max_position_embeddings", None)


def position_limit(config: Any) -> int | None:
    """Return the largest number of positions that the model computes; None with RoPE (no limit), or if unknown."""
    return None if getattr(text_config(config), "rope_parameters", None) else max_positions(config)
