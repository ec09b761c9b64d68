"""Texts for prompts, by ``model.generate`` in batches."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..data.chat import Prompt, is_conversation, parse_messages
from ..data.tokenize import decode_response, encode_prompts
from ..errors import NOT_FINITE, ModelError, SkipDecodeError, UsageError
from ..loading.device import free_memory, synchronize, watch_memory
from ..model.cache import SkipCache, total_kv_bytes
from ..model.cache_name import CACHE, CACHE_NAMES
from ..model.config import num_layers, trained_schedules
from ..model.inspect import gates_of
from ..schedule import Schedule, choose_schedule
from .batches import prompt_error, split_batches
from .finished_rows import FinishedRows
from .stats import Completion, GenerationOutput, GenerationStats

#: How to decode: by a schedule, with the full model (None), or with the cache that a function makes for each batch.
Decoding = Schedule | Callable[[PreTrainedModel], DynamicCache] | None

_OWN_CACHE = "each batch has a cache of its own"
_DRAFT = "what a draft costs would be missing from the stats; call model.generate"
_PADDED = "it counts padding, so that a text would depend on its batch"
#: Options of ``model.generate`` that would silently be wrong, or change what is measured.
REFUSED = {
    **dict.fromkeys([*CACHE_NAMES, "cache_implementation"], _OWN_CACHE),
    "generation_config": "give its values as options",
    "max_length": f"{_PADDED}: give max_new_tokens",
    "num_return_sequences": "one text per prompt is generated; repeat the prompt instead",
}
#: Those that the checkpoint's generation_config may not have either.
NEVER = {
    **dict.fromkeys(["assistant_model", "is_assistant", "assistant_early_exit", "use_mtp", "speculation_type"], _DRAFT),
    "guidance_scale": "it runs the model a second time in every step, with all its layers",
    "min_length": f"{_PADDED}: give min_new_tokens",
}


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
    """A text for each prompt, in the order of the prompts.

    Args:
        model: a causal LM with gates attached (:func:`skipdecode.load`, or :func:`skipdecode.attach`).
        tokenizer: its tokenizer.
        prompts: a text, a conversation (a list of ``{"role": …, "content": …}``), or a list of either. The tokenizer's
            chat template is applied to conversations; a last message of the assistant is continued.
        speedup: target speed-up in layers; 1 is the full model. None: the slowest trained one above 1.
        schedule: a schedule or its file, in place of a speed-up.
        batch_size: most prompts per call of ``model.generate``; fewer where memory is short. They have like lengths.
        seed: of sampling; a text depends on its batch. None: torch's generator goes on.
        options: options of ``model.generate`` (``max_new_tokens``, ``do_sample``, ``num_beams``, …). Decoding is greedy
            unless ``do_sample`` is set, whatever the checkpoint's generation_config says.

    Raises:
        ScheduleError: the schedule does not fit the model.
        UsageError: a prompt has no token, or needs more positions than the model has; an option is not supported.
        ModelError: the model's logits are NaN or infinite.

    Example:
        >>> model, tokenizer = skipdecode.load("demo")
        >>> result = skipdecode.generate(model, tokenizer, ["name Aromi, food English ->"], speedup=3)
        >>> result.completions[0].text, result.stats.layer_ratio
    """
    if speedup is not None and schedule is not None:
        raise UsageError("give one of speedup and schedule")
    if isinstance(schedule, (str, Path)):
        schedule = Schedule.load(schedule)
    if schedule is None:
        schedule = choose_schedule(trained_schedules(model), num_layers(model.config), speedup)
    ids = encode_prompts(tokenizer, to_prompts(prompts))
    adapter = gates_of(model).adapter
    if adapter is not None and not schedule.is_full:
        options = with_sampling(adapter.sampling, options)
    return generate_ids(model, tokenizer, ids, schedule, batch_size, seed, **options)


def with_sampling(sampling: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``model.generate``, with an adapter's sampling where they name none; if greedy, its penalty alone."""
    used = sampling if options.get("do_sample") else sampling.keys() & {"repetition_penalty"}
    given = {name: value for name, value in options.items() if value is not None}
    return {name: sampling[name] for name in used} | given


def to_prompts(prompts: Any) -> list[Prompt]:
    """List of prompts from one text or conversation, or from several. Raises UsageError for anything else."""
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise UsageError(f"prompts are a text, a list of messages, or a list of either, not {prompts!r}")
    prompts = [prompts] if isinstance(prompts, str) or is_conversation(prompts) else list(prompts)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_conversation(prompt):
            raise UsageError(f"prompt {number} is neither a text nor a list of messages: {prompt!r}")
    return [prompt if isinstance(prompt, str) else parse_messages(prompt) for prompt in prompts]


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    batch_size: int,
    seed: int | None = None,
    on_batch: Callable[[GenerationStats], object] = lambda stats: None,
    **options: Any,
) -> GenerationOutput:
    """A text for each prompt of token ids, as :func:`generate` does; ``on_batch`` gets each batch's stats."""
    options = {name: value for name, value in options.items() if value is not None}
    check_options(options, model.generation_config)
    most = options["max_new_tokens"] = max_new_tokens(options, model.generation_config)
    for number, prompt in enumerate(prompts):
        if reason := prompt_error(model.config, prompt, most):
            raise UsageError(f"prompt {number}: {reason}")
    if isinstance(decoding, Schedule) and decoding.is_full:
        decoding = None
    output = GenerationOutput(GenerationStats(num_layers(model.config)))
    completions: dict[int, Completion] = {}
    beams = options.get("num_beams") or model.generation_config.num_beams or 1
    room = free_memory(model.device) / model.dtype.itemsize / beams
    for index, batch in enumerate(split_batches(model.config, prompts, batch_size, most, room)):
        if seed is not None:
            torch.manual_seed((seed + index) % 2**64)
        rows, stats = _generate_batch(model, tokenizer, [list(prompts[i]) for i in batch], decoding, dict(options))
        completions.update(zip(batch, rows, strict=True))
        output.stats += stats
        output.lengths.append(stats.steps)
        on_batch(stats)
    output.completions = [completions[i] for i in range(len(prompts))]
    return output


class NaNCheck(LogitsProcessor):
    """Raises ModelError for NaN or infinite logits of the full model, as a :class:`SkipCache`'s passes do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores (batch, vocabulary), unchanged."""
        if not scores.amax(-1).isfinite().all():
            raise ModelError(NOT_FINITE)
        return scores


class Progress(StoppingCriteria):
    """Ends rows where other criteria do, counts passes, and notes each row's length.

    Attributes:
        passes: forward passes; verifying several tokens of prompt lookup is one.
        prompt_done: ``time.perf_counter()`` after the first pass.
        ended: which rows have ended (rows,).
        lengths: number of tokens of the rows that have ended, else 0 (rows,).
    """

    def __init__(self, ends: Iterable[StoppingCriteria], prompts: Tensor) -> None:
        self.ends = StoppingCriteriaList(ends)
        self.width = prompts.shape[1]
        self.passes = 0
        self.prompt_done = 0.0
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=prompts.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows have ended now (rows,)."""
        if not self.passes:
            synchronize(input_ids.device)
            self.prompt_done = time.perf_counter()
        self.passes += 1
        ended = self.ends(input_ids, scores, **kwargs)
        if len(ended) == len(self.ended):  # not with beams
            self.lengths[ended & ~self.ended] = input_ids.shape[1] - self.width
            self.ended |= ended  # in place: others hold this tensor
        return ended


def _generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    options: dict[str, Any],
) -> tuple[list[Completion], GenerationStats]:
    config = model.generation_config
    layers = num_layers(model.config)
    width = max(map(len, prompts))
    # The attention mask hides padding, but not from some releases' repetition penalty: a prompt's own token adds none.
    ids = torch.tensor([[prompt[0]] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    end_tokens = end_token_ids(options, config)
    stop_strings = options.get("stop_strings", config.stop_strings)
    ends: list[StoppingCriteria] = [EosTokenCriteria(end_tokens)] if end_tokens else []
    if stop_strings:
        ends.append(StopStringCriteria(tokenizer, stop_strings))
    progress = Progress([*ends, *options.pop("stopping_criteria", ())], ids)
    processors = LogitsProcessorList([NaNCheck(), *options.pop("logits_processor", ())])
    peak_memory = watch_memory(model.device)
    start = time.perf_counter()
    if decoding is None:
        cache: Any = DynamicCache(config=model.config)
    else:
        cache = SkipCache(model, decoding) if isinstance(decoding, Schedule) else decoding(model)
    beams = options.get("num_beams") or config.num_beams or 1
    size = model.get_input_embeddings().weight.shape[0]
    candidates = [tokenizer.pad_token_id, config.pad_token_id, *end_tokens, 0]  # any that has an embedding will do
    # These come before the checkpoint's generation_config.
    defaults = {
        "do_sample": False,
        "use_cache": True,
        "cache_implementation": None,
        "num_return_sequences": 1,
        "pad_token_id": next(token for token in candidates if token is not None and 0 <= token < size),
    }
    # Without end tokens, ``generate`` does not pad the rows that have ended.
    leaving = FinishedRows(model, cache, progress.ended) if beams == 1 and end_tokens else nullcontext()
    with leaving:
        try:
            output = model.generate(
                ids,
                attention_mask=mask,
                **{CACHE: cache},
                tokenizer=tokenizer if stop_strings else None,
                stopping_criteria=StoppingCriteriaList([progress]),
                logits_processor=processors,
                **defaults | options | {"return_dict_in_generate": True},
            )
        except (TypeError, ValueError) as error:
            if progress.passes or isinstance(error, SkipDecodeError):
                raise
            raise UsageError(f"model.generate refuses these options: {' '.join(str(error).split())}") from error
    synchronize(model.device)
    end = time.perf_counter()
    sequences = output.sequences[:, width:].tolist()
    completions = []
    for prompt, sequence, length in zip(prompts, sequences, progress.lengths.tolist(), strict=True):
        if beams > 1:
            sequence = [token for token in sequence if token >= 0]  # -1 fills up beams without an end
            length = next((n for n, token in enumerate(sequence, 1) if token in end_tokens), 0)
        tokens = sequence[: length or None]
        text = decode_response(tokenizer, prompt, tokens)
        completions.append(Completion(text, len(tokens), "stop" if length else "length"))
    steps = progress.passes - 1
    prompt_schedule = decoding if isinstance(decoding, Schedule) else Schedule.full(layers)
    return completions, GenerationStats(
        layers,
        rows=len(prompts),
        tokens=sum(completion.tokens for completion in completions),
        seconds=end - start,
        decode_seconds=end - progress.prompt_done,
        steps=steps,
        layer_steps=sum(getattr(cache, "step_depths", [layers] * steps)),
        row_layers=getattr(cache, "row_layers", 0),
        row_steps=getattr(cache, "row_steps", 0),
        prompt_positions=width,
        prompt_layer_positions=sum(prompt_schedule.positions_per_layer(width, width)),
        peak_kv_bytes=getattr(cache, "peak_kv_bytes", 0)
        or max(total_kv_bytes(cache), getattr(leaving, "peak_kv_bytes", 0)),
        peak_memory_bytes=peak_memory(),
    )


def check_options(options: Mapping[str, Any], defaults: GenerationConfig) -> None:
    """Raise UsageError for options, or defaults of the checkpoint, that are refused or contradict each other."""
    for name, reason in (REFUSED | NEVER).items():
        value = options.get(name, getattr(defaults, name, None) if name in NEVER else None)
        if value is True or value not in (None, False, 0, 1):  # 1 text, a guidance of 1, …
            raise UsageError(f"{name}: {reason}")
    if not options.get("use_cache", True):
        raise UsageError(f"use_cache=False: {_OWN_CACHE}")
    if not isinstance(beams := options.get("num_beams", 1), int) or beams < 1:
        raise UsageError(f"num_beams is at least 1, not {beams!r}")
    if options.get("do_sample") and options.get("temperature", defaults.temperature) == 0:
        raise UsageError("temperature 0: leave do_sample out for greedy decoding")
    if (stops := options.get("stop_strings")) == "" or "" in list(stops or ()):
        raise UsageError("an empty stop string would end every text at once: leave it out")
    known = vars(GenerationConfig())
    try:
        GenerationConfig(**{name: value for name, value in options.items() if name in known}).validate(strict=True)
        end_token_ids(options, defaults)
    except (TypeError, ValueError) as error:
        raise UsageError(" ".join(str(error).split())) from None


def max_new_tokens(options: Mapping[str, Any], defaults: GenerationConfig) -> int:
    """Most new tokens of a text: the option, else the checkpoint's value, else 20, as in transformers."""
    return options.get("max_new_tokens") or defaults.max_new_tokens or 20


def end_token_ids(options: Mapping[str, Any], defaults: GenerationConfig) -> list[int]:
    """Ids of the tokens that end a text."""
    ends = options.get("eos_token_id", defaults.eos_token_id)
    return [] if ends is None else sorted(torch.as_tensor(ends).flatten().tolist())
