"""Check and read options of ``model.generate``: the same rules for all callers."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from ..errors import UsageError
from ..model.cache_name import CACHE_NAMES
from ..schedule import Schedule

_OURS = "it is made from the prompts"
_CACHE = "each batch has a cache of its own, at full depth too"
_MORE = "texts and their cost are returned; for more, give model.generate a SkipCache"
_GONE = "transformers no longer has this way of decoding"
_DRAFT = "what the draft costs would be missing from the cost; call model.generate"
_PADDED = "it counts the prompt and its padding, so a text would depend on its batch"
#: Options of ``model.generate`` that SkipDecode refuses, and why.
REFUSED = {
    "inputs": _OURS,
    "input_ids": _OURS,
    "inputs_embeds": _OURS,
    "attention_mask": _OURS,
    **dict.fromkeys(CACHE_NAMES, _CACHE),
    "cache_implementation": _CACHE,
    "return_dict_in_generate": _MORE,
    "output_scores": _MORE,
    "output_logits": _MORE,
    "output_attentions": _MORE,
    "output_hidden_states": _MORE,
    "streamer": "texts come batch by batch; to stream one, give model.generate a SkipCache",
    "generation_config": "give its values as options",
    "guidance_scale": "it runs the model a second time in every step, with all its layers",
    "assistant_model": _DRAFT,
    "assistant_early_exit": _DRAFT,
    "use_mtp": _DRAFT,
    "speculation_type": _DRAFT,
    "max_length": f"{_PADDED}: give max_new_tokens",
    "min_length": f"{_PADDED}: give min_new_tokens",
    "encoder_repetition_penalty": _PADDED,
    "encoder_no_repeat_ngram_size": _PADDED,
    "token_healing": "it rewrites the prompt",
    "penalty_alpha": _GONE,
    "dola_layers": _GONE,
    "num_beam_groups": _GONE,
    "constraints": _GONE,
    "force_words_ids": _GONE,
    "custom_generate": "it would replace the loop whose steps are counted",
}
#: Refused options that a checkpoint's generation_config may not set either.
NEVER = tuple(name for name, reason in REFUSED.items() if reason in (_DRAFT, _GONE))
NEVER += ("guidance_scale", "min_length", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "token_healing")
#: Values of these with which they do nothing, beside None, 0 and False.
NEUTRAL = {"guidance_scale": 1, "encoder_repetition_penalty": 1, "num_beam_groups": 1}
#: Options that have an effect only with ``do_sample``.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
#: transformers' default of ``max_new_tokens``.
NEW_TOKENS = 20


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, which means "not given"."""
    return {name: value for name, value in options.items() if value is not None}


def check_options(options: Mapping[str, Any], batch_size: int = 1, seed: int | None = None) -> None:
    """Check options without a model. Raise UsageError if one is refused or unknown, or two contradict each other."""
    options = given(options)
    if type(batch_size) is not int or batch_size < 1:
        raise UsageError(f"batch_size is a number of rows, 1 or more, not {batch_size!r}")
    if seed is not None and type(seed) is not int:
        raise UsageError(f"seed is a whole number, not {seed!r}")
    for name, reason in REFUSED.items():
        if options.get(name, False) is not False:
            raise UsageError(f"{name}: {reason}")
    known = {*vars(GenerationConfig()), *signature(GenerationMixin.generate).parameters}
    if unknown := sorted({*options} - known - {*REFUSED}):
        raise UsageError(f"model.generate has no option {', '.join(unknown)}")
    if options.get("stop_strings") == "" or "" in [*options.get("stop_strings", ())]:
        raise UsageError("an empty stop string would end every text at once")
    unsampled = [name for name in SAMPLING if name in options and not options.get("do_sample")]
    if unsampled:
        raise UsageError(f"sampling options ({', '.join(unsampled)}) need do_sample as well (--do-sample)")
    new, least = options.get("max_new_tokens"), options.get("min_new_tokens")
    if new is not None and (not isinstance(new, Integral) or new < 1):
        raise UsageError(f"max_new_tokens is a number of tokens, 1 or more, not {new!r}")
    if new is not None and least is not None and least > new:
        raise UsageError(f"min_new_tokens {least} is more than max_new_tokens {new}")
    if not options.get("use_cache", True):  # each pass would give the whole text to a cache that holds it
        raise UsageError(f"use_cache=False: {_CACHE}; leave it out")
    if options.get("num_return_sequences", 1) != 1:
        raise UsageError("one text per prompt is generated: repeat the prompt instead of num_return_sequences")
    if "prompt_lookup_num_tokens" in options and batch_size != 1:
        raise UsageError("prompt_lookup_num_tokens: transformers looks up one row at a time: give batch_size=1")


def check_with_model(options: Mapping[str, Any], defaults: GenerationConfig, seed: int | None = None) -> None:
    """Check options that depend on a checkpoint's generation_config. Raises UsageError if the two do not fit."""
    options = given(options)
    for name in NEVER:
        asked = getattr(defaults, name, None)
        if name not in options and asked and asked != NEUTRAL.get(name):
            raise UsageError(
                f"the checkpoint's generation_config asks for {name}: {REFUSED[name]}; set it to None there"
            )
    if "length_penalty" in options and num_beams(options, defaults) == 1:
        raise UsageError("length_penalty goes with num_beams")
    mark = options.get("watermarking_config", defaults.watermarking_config)
    if seed is not None and mark is not None and options.get("do_sample") and num_beams(options, defaults) == 1:
        raise UsageError("watermarking_config and seed: both would be the last to touch the scores; leave one out")


def given_schedule(speedup: float | None, schedule: object) -> Schedule | None:
    """Return the schedule, read if it is a path.

    Raises:
        UsageError: both a speed-up and a schedule are given, or the schedule is something else.
    """
    if speedup is not None and schedule is not None:
        raise UsageError("give one of speedup and schedule")
    if isinstance(schedule, (str, Path)):
        return Schedule.load(schedule)
    if isinstance(schedule, (Schedule, type(None))):
        return schedule
    raise UsageError(f"schedule is a Schedule or the path of its JSON file, not {schedule!r}")


def num_beams(options: Mapping[str, Any], defaults: GenerationConfig) -> int:
    """Return the number of beams: the option, else the checkpoint's default, else 1, which is no beam search."""
    return options.get("num_beams") or defaults.num_beams or 1


def max_new_tokens(options: Mapping[str, Any], defaults: GenerationConfig) -> int:
    """Return the largest number of new tokens per text: the option, else the checkpoint's default, else 20."""
    return options.get("max_new_tokens") or defaults.max_new_tokens or NEW_TOKENS


def end_tokens(options: Mapping[str, Any], defaults: GenerationConfig) -> set[int]:
    """Return the token ids that end a text: those of the option ``eos_token_id``, else the checkpoint's."""
    ends: Any = options.get("eos_token_id", defaults.eos_token_id)
    ends = ends.flatten().tolist() if hasattr(ends, "flatten") else ends
    return {ends} if isinstance(ends, int) else set(ends or ())
