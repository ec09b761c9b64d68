"""Generate one batch of prompts with the ordinary ``model.generate``, and measure its cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..data.tokenize import decode_behind
from ..errors import ModelError
from ..loading.device import synchronize
from ..model.attach import attach
from ..model.cache import SkipCache, total_kv_bytes
from ..model.cache_name import CACHE
from ..model.config import num_layers
from ..schedule import Schedule
from .finished_rows import track_finished_rows
from .options import end_tokens, given, max_new_tokens, num_beams
from .stats import Completion, GenerationStats

#: How to decode: with a schedule, with the stock model (None), or with the cache that a function makes for each batch.
Decoding = Schedule | Callable[[PreTrainedModel], DynamicCache] | None


class Passes(StoppingCriteria):
    """A stopping criterion that stops no sequence: it counts and times the forward passes of a ``generate`` call.

    ``generate`` calls stopping criteria once per pass in every decoding mode. It calls logits processors once per
    token, which is several times in a pass that verifies tokens of prompt lookup.

    Args:
        every: time every pass, not only the first. Each timed pass waits for the device.

    Attributes:
        count: passes so far; a prompt that is prefilled in chunks counts as one pass.
        times: ``time.perf_counter()`` at the end of each timed pass.
    """

    def __init__(self, every: bool = False) -> None:
        self.every = every
        self.count = 0
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Count the pass, time it if :class:`Passes` says so, and return (batch,) False: no sequence stops."""
        if self.every or not self.count:
            synchronize(input_ids.device)
            self.times.append(time.perf_counter())
        self.count += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Finite(LogitsProcessor):
    """A logits processor that changes nothing: it refuses the first scores after the prompt, and after a step, if NaN.

    Their likeliest token is the first of the vocabulary, so that without it a broken model writes, and looks whole.
    """

    def __init__(self) -> None:
        self.left = 2

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (batch, vocabulary). Raises ModelError for NaN."""
        if self.left and scores.isnan().any():
            raise ModelError("the model's logits are NaN: a lower speed-up, or float32 or bfloat16, may help")
        self.left = max(self.left - 1, 0)
        return scores


def generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    *,
    passes: Passes | None = None,
    **options: Any,
) -> tuple[list[Completion], GenerationStats]:
    """Generate for one batch of token-id prompts. Finished sequences leave it (:mod:`.finished_rows`).

    Args:
        decoding: a schedule, None for the unmodified model, or a function that makes the batch's cache.
        passes: counts the passes of this call.
        options: passed to ``model.generate``; decoding is greedy unless they set ``do_sample``.

    Returns:
        The completions in the order of ``prompts``, and the cost of the batch.

    Raises:
        ModelError: the model's logits are NaN, or the batch does not fit into memory.
    """
    passes = passes or Passes()
    options, asked = given(options), model.generation_config
    width, layers = max(map(len, prompts)), num_layers(model.config)
    padding = tokenizer.pad_token_id, asked.pad_token_id, min(end_tokens({}, asked), default=None), 0
    pad = options.setdefault("pad_token_id", next(token for token in padding if token is not None))
    # Any token will do, since the attention mask hides it; but these options take padding for text (the penalty before
    # transformers 5.24), to which a prompt's own first token adds none.
    penalty, grams = (
        options.get(name, getattr(asked, name)) for name in ("repetition_penalty", "no_repeat_ngram_size")
    )
    is_text = penalty not in (None, 1.0) or grams == 1
    ids = torch.tensor([[p[0] if is_text else pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    start = time.perf_counter()
    if decoding is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = SkipCache(attach(model), decoding) if isinstance(decoding, Schedule) else decoding(model)
    strings, stops = options.get("stop_strings", asked.stop_strings), end_tokens(options, asked)
    finished = track_finished_rows(model, tokenizer, cache, len(prompts), stops, strings, options)
    criteria = options.pop("stopping_criteria", [])
    options["logits_processor"] = LogitsProcessorList([Finite(), *options.get("logits_processor", ())])
    # These override what the checkpoint's generation config says of cache and outputs.
    defaults = {"do_sample": False, "num_return_sequences": 1, "use_cache": True, "cache_implementation": None}
    defaults |= {"max_new_tokens": max_new_tokens(options, asked)}
    with finished or nullcontext(), _names_memory(len(prompts), width):
        output = model.generate(
            ids,
            attention_mask=mask,
            **{CACHE: cache},
            tokenizer=tokenizer if strings else None,
            stopping_criteria=StoppingCriteriaList([passes, *([finished] if finished else criteria)]),
            **defaults | options | {"return_dict_in_generate": True},
        )
    synchronize(model.device)
    end = time.perf_counter()
    sequences = output.sequences.where(output.sequences >= 0, pad)  # beams without an end are filled up with -1
    written = sequences[:, width:].tolist()
    ends = [next((n for n, token in enumerate(row, 1) if token in stops), None) for row in written]
    if strings:
        stop = StopStringCriteria(tokenizer, strings)
        for length in range(1, len(written[0]) + 1):
            for row, met in enumerate(stop(sequences[:, : width + length], None).tolist()):
                if met:
                    ends[row] = min(ends[row] or length, length)
    if criteria:
        ends = [end or _unpadded(row, pad) for row, end in zip(written, ends, strict=True)]
    rows = []
    for prompt, row, count in zip(prompts, written, ends, strict=True):
        new, reason = row[:count], "length" if count is None else "stop"
        rows.append(Completion(decode_behind(tokenizer, prompt, new), len(new), reason))
    steps = passes.count - 1
    if num_beams(options, asked) == 1:  # on MPS, transformers stops a pass late, and drops the token of that pass
        steps = min(steps, len(written[0]) - 1)
    in_prompt = decoding.positions_per_layer(width, width) if isinstance(decoding, Schedule) else [width] * layers
    cost = GenerationStats(
        layers,
        rows=len(prompts),
        tokens=sum(row.tokens for row in rows),
        seconds=end - start,
        decode_seconds=end - passes.times[0],
        steps=steps,
        layer_steps=sum(getattr(cache, "step_depths", [layers] * steps)[:steps]),
        row_layers=getattr(cache, "row_layers", 0),
        row_steps=getattr(cache, "row_steps", 0),
        prompt_positions=width,
        prompt_layer_positions=sum(in_prompt),
        # A stock cache is largest at the end, or just before finished sequences leave it.
        peak_kv_bytes=getattr(cache, "peak_kv_bytes", None)
        or max(total_kv_bytes(cache), finished.peak_kv_bytes if finished else 0),
    )
    return rows, cost


def _unpadded(row: Sequence[int], pad: int) -> int | None:
    """Return the number of tokens before the padding at the end of ``row``; None if there is no padding."""
    length = next((n for n in range(len(row), 0, -1) if row[n - 1] != pad), 0)
    return length if length < len(row) else None


@contextmanager
def _names_memory(rows: int, width: int) -> Iterator[None]:
    """Raise ModelError for a batch that an accelerator has no memory for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{rows} rows of {width} prompt tokens do not fit into memory: a smaller batch size"
        ) from error
