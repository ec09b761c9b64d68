"""Which of ``model.generate``'s options are taken, and how greedy or sampling is chosen: one rule for all callers."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from ..errors import UsageError

_OURS = "it is made from the prompts"
_MORE = "texts and their cost are returned; for more, give model.generate a SkipCache"
_GONE = "transformers no longer has this way of decoding"
#: Options of ``model.generate`` that are not taken here, and why.
REFUSED = {
    "inputs": _OURS,
    "input_ids": _OURS,
    "inputs_embeds": _OURS,
    "attention_mask": _OURS,
    "past_key_values": "each batch has a cache of its own",
    "cache_implementation": "each batch has a cache of its own",
    "return_dict_in_generate": _MORE,
    "output_scores": _MORE,
    "output_logits": _MORE,
    "output_attentions": _MORE,
    "output_hidden_states": _MORE,
    "streamer": "texts come batch by batch; to stream one, give model.generate a SkipCache",
    "generation_config": "give its values as options",
    "guidance_scale": "it runs the model a second time in every step, with all its layers",
    "penalty_alpha": _GONE,
    "dola_layers": _GONE,
    "num_beam_groups": _GONE,
    "constraints": _GONE,
    "force_words_ids": _GONE,
    "custom_generate": "it would replace the loop whose steps are counted",
}


#: Options that say how to sample. Without ``do_sample`` they would say nothing.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def check_options(options: Mapping[str, Any], batch_size: int | str = 1, seed: int | None = None) -> None:
    """What can be said of options without a model. Decoding is greedy unless ``do_sample`` is among them.

    Raises:
        UsageError: an option that is not taken, or options that contradict each other.
    """
    if batch_size != "auto" and (type(batch_size) is not int or batch_size < 1):
        raise UsageError(f"batch_size is a number of rows, 1 or more, or 'auto', not {batch_size!r}")
    if seed is not None and type(seed) is not int:
        raise UsageError(f"seed is a whole number, not {seed!r}")
    for name, reason in REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise UsageError(f"{name}: {reason}")
    known = {*vars(GenerationConfig()), *signature(GenerationMixin.generate).parameters}
    if unknown := sorted({*options} - known - {*REFUSED}):
        raise UsageError(f"model.generate has no option {', '.join(unknown)}")
    if "" in (options.get("stop_strings") or ()) or options.get("stop_strings") == "":
        raise UsageError("an empty stop string would end every text at once")
    given = [name for name in SAMPLING if options.get(name) is not None]
    if given and not options.get("do_sample"):
        raise UsageError(f"sampling options ({', '.join(given)}) need do_sample as well (--do-sample)")
    new, least = options.get("max_new_tokens"), options.get("min_new_tokens")
    if new is not None and least is not None and least > new:
        raise UsageError(f"min_new_tokens {least} is more than max_new_tokens {new}")
    if options.get("use_cache", True) in (False, 0):  # the whole text would go to a cache that holds it already
        raise UsageError("use_cache=False: each batch has a cache of its own, at full depth too; leave it out")
    if options.get("num_return_sequences", 1) != 1:
        raise UsageError("one text per prompt is generated: repeat the prompt instead of num_return_sequences")


def check_with_model(options: Mapping[str, Any], defaults: GenerationConfig, seed: int | None = None) -> None:
    """What options mean with a checkpoint's generation_config, which may ask for the same. Raises UsageError."""
    for name, reason in REFUSED.items():
        asked = name not in options and getattr(defaults, name, None)
        if asked and (reason == _GONE or name == "guidance_scale"):
            raise UsageError(f"the checkpoint's generation_config asks for {name}: {reason}; give {name}=None")
    if options.get("length_penalty") is not None and num_beams(options, defaults) == 1:
        raise UsageError("length_penalty goes with num_beams")
    mark = options.get("watermarking_config", defaults.watermarking_config)
    if seed is not None and mark is not None and options.get("do_sample") and num_beams(options, defaults) == 1:
        raise UsageError("watermarking_config and seed: both would be the last to touch the scores; leave one out")


def num_beams(options: Mapping[str, Any], defaults: GenerationConfig) -> int:
    """How many beams are searched: 1 is no beam search."""
    return options.get("num_beams", defaults.num_beams) or 1
