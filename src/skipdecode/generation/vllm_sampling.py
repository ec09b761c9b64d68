"""Translates transformers' decoding options to vLLM's, and refuses those that vLLM lacks. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from ..errors import UsageError
from .options import SAMPLING

#: transformers' name -> vLLM's name, and transformers' default if neither options nor checkpoint set a value.
SAMPLED: dict[str, tuple[str, Any]] = {
    "temperature": ("temperature", 1.0),
    "top_k": ("top_k", 50),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
}
ALWAYS: dict[str, tuple[str, Any]] = {
    "repetition_penalty": ("repetition_penalty", 1.0),
    "max_new_tokens": ("max_tokens", 20),
    "min_new_tokens": ("min_tokens", 0),
}
#: Further accepted options. The engine finds stop strings itself, as transformers does.
OTHERS = ("do_sample", "eos_token_id", "stop_strings")
#: An option with this value, None or False changes nothing.
OFF: dict[str, Any] = GenerationConfig._get_default_generation_params()
#: Fields of a checkpoint's generation_config that do not change which tokens are chosen, so they are ignored.
ASIDE = frozenset(
    """max_length early_stopping length_penalty diversity_penalty use_mtp use_cache cache_implementation cache_config
    max_cache_len output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    pad_token_id bos_token_id decoder_start_token_id is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
    assistant_ensemble_weight speculation_type compile_config disable_compile continuous_batching_config low_memory
    prefill_chunk_size num_return_sequences _from_model_config transformers_version""".split()
)
#: The range that vLLM accepts: it raises lower temperatures to the minimum, and refuses higher ones.
TEMPERATURES = (0.01, 2.0)


def sampling_params(options: Mapping[str, Any], defaults: GenerationConfig, config: Any) -> dict[str, Any]:
    """Return arguments of vLLM's ``SamplingParams`` (without a seed) that decode like ``model.generate``.

    Args:
        options: as ``model.generate`` names them.
        defaults: the checkpoint's generation_config: its values apply where ``options`` has none.
        config: the model's config.

    Raises:
        UsageError: vLLM lacks an option or a setting of the checkpoint, or refuses the temperature.
    """
    if vars(defaults) == vars(GenerationConfig()):  # the checkpoint has no generation_config
        defaults = GenerationConfig.from_model_config(config)
    asked = {name: value for name, value in vars(defaults).items() if name in vars(GenerationConfig())}
    sample = bool(options.get("do_sample"))
    taken = {*SAMPLED, *ALWAYS, *OTHERS}
    aside = taken | ASIDE | options.keys() | (set() if sample else {*SAMPLING})
    for given, known, whose in ((options, taken, ""), (asked, aside, "the checkpoint's generation_config asks for ")):
        for name, value in given.items():
            is_on = value is not None and value is not False and value not in ([], OFF.get(name))
            if is_on and name not in known:
                raise UsageError(
                    f"{whose}{name}: the engine vllm has nothing like it: leave it out, or take the engine transformers"
                )
    values = asked | dict(options)
    params: dict[str, Any] = {"temperature": 0.0}
    for name, (theirs, default) in (ALWAYS | SAMPLED if sample else ALWAYS).items():
        params[theirs] = default if values.get(name) is None else values[name]
    least, most = TEMPERATURES
    if sample and not least <= params["temperature"] <= most:
        raise UsageError(f"temperature: vLLM takes {least} to {most}, not {params['temperature']}")
    ends = values.get("eos_token_id")
    params["stop_token_ids"] = [ends] if isinstance(ends, int) else list(ends or ())
    # stop_token_ids holds all tokens that end a text: vLLM must add none of its own.
    return params | {"ignore_eos": True, "detokenize": False}


def stop_strings(options: Mapping[str, Any], defaults: GenerationConfig) -> list[str]:
    """Return the strings that end a text: those of the options, else the checkpoint's."""
    strings = options.get("stop_strings", defaults.stop_strings) or []
    return [strings] if isinstance(strings, str) else list(strings)
