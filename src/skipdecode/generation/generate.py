"""Prompts in, texts and what they cost out: batches of similar length through the ordinary ``model.generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.checkpoint_config import layer_count
from ..core.schedule import Schedule
from ..core.stack import text_config
from ..data.chat import Message, Prompt, parse_messages
from ..data.tokenization import encode_prompts
from ..errors import ModelError, TaskError, UsageError
from ..planning.resolve import resolve_schedule
from ..weights.memory import is_out_of_memory
from .batch import Decoding, generate_batch
from .batch_size import BatchSize, batch_sizes
from .options import REFUSED, check_options, check_with_model, num_beams
from .results import Completion, Cost, Generated
from .sampling import Sampling, stable_hash


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompt | Iterable[Any],
    *,
    speedup: float | None = None,
    schedule: Schedule | str | Path | None = None,
    full: bool = False,
    batch_size: BatchSize = 32,
    seed: int | None = None,
    **options: Any,
) -> Generated:
    """Generate a text for each prompt.

    Args:
        prompts: a text, a conversation (a list of ``{"role": …, "content": …}``, to which the tokenizer's chat
            template is applied), or a list of either. Batches are made of similar lengths; completions come back in the
            order given.
        speedup, schedule: the budget, or (it goes first) the schedule or its file; by default the one in the config.
        full: the unmodified model instead.
        batch_size: rows per ``model.generate`` call; ``"auto"``: rows of like length, as many as fit into memory.
        seed: for sampling: a row's text then depends on it and on the row's place in ``prompts``, not on its batch
            (with beams: on the whole batch). None: torch's global generator.
        options: as ``model.generate`` names them (``max_new_tokens``, ``do_sample``, ``num_beams``, …). Greedy unless
            ``do_sample`` is given, whatever the checkpoint's generation_config says.

    Raises:
        ScheduleError: a schedule that does not fit the model.
        UsageError: no prompts, one that is no string or has no token, a prompt and ``max_new_tokens`` that need more
            positions than the model has, or options that are not taken.

    Example:
        >>> model, tokenizer = skipdecode.load("demo")
        >>> result = skipdecode.generate(model, tokenizer, ["name Aromi, food English ->"], speedup=3)
        >>> result.completions[0].text, result.cost.layer_ratio
    """
    texts = to_prompts(prompts)
    if isinstance(schedule, (str, Path)):
        schedule = Schedule.load(Path(schedule))
    elif not isinstance(schedule, (Schedule, type(None))):
        raise UsageError(f"schedule is a Schedule or the path of its JSON file, not {schedule!r}")
    if full and (speedup is not None or schedule is not None):
        raise UsageError("give one of speedup, schedule and full")
    chosen = None if full else resolve_schedule(model.config, speedup, schedule)
    return generate_ids(model, tokenizer, encode_prompts(tokenizer, texts), chosen, batch_size, seed=seed, **options)


def to_prompts(given: Any) -> list[Prompt]:
    """Texts and conversations from one of either, or a list of them. Raises UsageError."""
    if isinstance(given, str) or _is_conversation(given):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, (Mapping, bytes)):
        raise UsageError(f"prompts are texts or lists of messages, one or several, not {type(given).__name__}")
    prompts: list[Prompt] = []
    for number, prompt in enumerate(given):
        if _is_conversation(prompt):
            try:
                prompts.append(parse_messages(prompt))
            except TaskError as error:
                raise UsageError(f"prompt {number}: {error}") from None
        elif not isinstance(prompt, str):
            raise UsageError(f"prompt {number} is neither a text nor a list of messages: {prompt!r}")
        elif any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UsageError(f"prompt {number} holds a lone surrogate, which no tokenizer knows: {prompt!r}")
        else:
            prompts.append(prompt)
    if not prompts:
        raise UsageError("no prompts were given")
    return prompts


def _is_conversation(value: Any) -> bool:
    """Whether it is a list of messages, as chat templates take them."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, (Mapping, Message)) for m in value)


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    batch_size: BatchSize,
    on_batch: Callable[[Cost], object] | None = None,
    seed: int | None = None,
    **options: Any,
) -> Generated:
    """The same for token-id prompts and any decoding; ``on_batch`` is told each batch's cost."""
    empty = next((number for number, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise UsageError(f"prompt {empty} has no token to go on from: the tokenizer puts none at the beginning")
    room = max_positions(model.config)
    new = options.get("max_new_tokens") or 0
    if not new and options.get("max_length") is None:  # what the checkpoint asks for, else transformers' 20
        new = model.generation_config.max_new_tokens or 0
    longest = max(max(map(len, prompts), default=0) + new, 0 if new else options.get("max_length") or 0)
    if room is not None and longest > room:
        raise UsageError(f"the longest prompt and max_new_tokens need {longest} positions, the model has {room}")
    result = Generated(Cost(layer_count(model.config)))
    rows: dict[int, Completion] = {}
    for indices, batch, cost in batches(
        model, tokenizer, dict(enumerate(prompts)), decoding, batch_size, seed, **options
    ):
        rows.update(zip(indices, batch, strict=True))
        result.cost += cost
        result.lengths.append(cost.steps)
        if on_batch:
            on_batch(cost)
    result.completions = [rows[i] for i in range(len(prompts))]
    return result


def batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, list[int]],
    decoding: Decoding,
    batch_size: BatchSize,
    seed: int | None = None,
    **options: Any,
) -> Iterator[tuple[list[int], list[Completion], Cost]]:
    """(keys, rows, cost) of token-id ``prompts`` by batch; with a ``seed``, a key samples the same when run again."""
    options = {name: value for name, value in options.items() if value is not None or name not in REFUSED}
    check_options(options, batch_size, seed)
    check_with_model(options, model.generation_config, seed)
    # Similar lengths share a batch, the longest first: what does not fit in memory shows at once.
    order = sorted(prompts, key=lambda i: (-len(prompts[i]), i))
    sizes = None
    if not isinstance(batch_size, int) and order:
        sizes = batch_sizes(model, tokenizer, [prompts[i] for i in order], decoding, options)
    while order:
        size = sizes.next([len(prompts[i]) for i in order]) if sizes else int(batch_size)
        keys = order[:size]
        try:
            rows, cost = _batch(model, tokenizer, prompts, keys, decoding, seed, options)
        except Exception as error:
            if sizes is None or not is_out_of_memory(error):
                raise
            if size == 1:
                raise ModelError(f"not even one row of {len(prompts[keys[0]])} tokens fits into memory") from error
            sizes.halve(size)
            continue
        finally:
            if sizes and model.device.type == "cuda":
                torch.cuda.empty_cache()  # batches of other shapes find no use for the pieces
        order = order[size:]
        yield keys, rows, cost


def _batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, list[int]],
    keys: Sequence[int],
    decoding: Decoding,
    seed: int | None,
    options: Mapping[str, Any],
) -> tuple[list[Completion], Cost]:
    """The rows of these keys, with random numbers of their own where a seed is given."""
    chosen = [prompts[i] for i in keys]
    if seed is None or not options.get("do_sample"):
        return generate_batch(model, tokenizer, chosen, decoding, **options)
    # Beams are drawn for all rows at once: there it is the batch that is the same when run again.
    own = {} if num_beams(options, model.generation_config) > 1 else {"watermarking_config": Sampling(seed, keys)}
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(stable_hash(seed, *keys))
        return generate_batch(model, tokenizer, chosen, decoding, **{**options, **own})


def max_positions(config: Any) -> int | None:
    """How many tokens, prompt and new ones together, a model has positions for; None if its config does not say."""
    return getattr(text_config(config), "max_position_embeddings", None)
