"""Runs a generation job with vLLM's engine in this process; every prompt follows the job's schedule."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from ..data.tokenize import decode_behind
from ..errors import ModelError, SkipDecodeError, UsageError
from ..loading.checkpoint_checks import check_tokenizer
from ..loading.device import placement
from ..loading.load import (
    adapter_of,
    load_tokenizer,
    read_config,
    read_generation_config,
    read_weights,
    refuse_gguf,
    resolve,
)
from ..loading.memory import available_memory
from ..model.config import CONFIG_KEY, num_layers
from ..model.inspect import text_config
from ..schedule import Schedule
from ..serving.plugin import register
from ..serving.server import require_vllm
from .engine import Batch, EngineConfig, Write
from .sampling import stable_hash
from .stats import Completion, GenerationStats
from .vllm_sampling import sampling_params, stop_strings

#: Defaults for vLLM's environment variables: it logs to stderr, since completions may go to stdout, and the engine runs
#: in this process, so that it cannot outlive it.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Completions go to the journal when there are ``batch_size`` of them, or after so many seconds.
SECONDS = 10.0
#: Least value of vLLM's token budget per step (``max_num_batched_tokens``).
PROMPT_TOKENS = 2048
#: The share of free memory that the KV cache may take.
SHARE = 0.5


@dataclass(frozen=True)
class VllmEngine:
    """vLLM for :class:`~skipdecode.generation.job.GenerationJob`: ``GenerationJob(…, engine=VllmEngine())``.

    The job's ``batch_size`` limits how many prompts run at once: when one ends, the next starts.

    Raises:
        MissingExtra: vLLM is not installed.
        UnsupportedModel: this release of vLLM was not tested.
    """

    name: str = "vllm"

    def __post_init__(self) -> None:
        require_vllm()

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Raise UsageError for an option that vLLM lacks, or treats differently from transformers."""
        refuse_gguf(job.model, "the engine vllm")
        given = {"clock": job.clock != "layers", "quantization": job.quantization, "prepack": job.prepack}
        for name, is_given in (given | {"offload": job.offload}).items():
            if is_given:
                raise UsageError(f"{name} does not go with the engine vllm: it is of transformers' loop")
        sampling_params(job.options, defaults, config)
        dtype, device = placement(config, job.dtype, job.device)
        _dtype(dtype, config)
        if torch.device(device).type != "cpu":
            raise UsageError(f"the engine vllm was tried on CPUs only, so far, not on {device}: give device cpu")

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """Start vLLM's engine with the job's model, yield a function that generates texts, and stop the engine on exit.

        ``schedule`` None runs the unmodified model; ``positions`` is the largest number of tokens of prompt and text.
        Raises ModelError if vLLM cannot run the model.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        config = read_config(job.model, job.revision)
        tokenizer = load_tokenizer(job.model, job.revision)
        # vLLM ignores missing or non-finite weights; read_weights raises an error. Its result is dropped at once.
        read_weights(resolve(job.model), config=config, dtype=job.dtype, revision=job.revision)
        check_tokenizer(job.model, tokenizer, text_config(config).vocab_size)
        engine = _engine(job, config, schedule, positions)
        try:
            yield _Writer(engine, tokenizer, job, config, schedule)
        finally:
            from vllm.distributed import cleanup_dist_env_and_memory

            engine.engine_core.shutdown()
            del engine
            gc.collect()
            cleanup_dist_env_and_memory()


class _Writer:
    """Generates completions for prompts, and yields them in the order in which they end."""

    def __init__(
        self,
        engine: Any,
        tokenizer: PreTrainedTokenizerBase,
        job: EngineConfig,
        config: Any,
        schedule: Schedule | None,
    ) -> None:
        defaults = read_generation_config(job.model, job.revision)
        self.engine, self.tokenizer, self.seed = engine, tokenizer, job.seed
        self.rows = job.batch_size
        self.schedule = schedule or Schedule.full(num_layers(config))
        self.params = sampling_params(job.options, defaults, config)
        strings = stop_strings(job.options, defaults)
        self.stop = StopStringCriteria(tokenizer, strings) if strings else None

    def __call__(self, prompts: Mapping[int, list[int]]) -> Iterator[Batch]:
        """Yield batches of completions as they end; the longest prompts start first, as with transformers."""
        waiting = iter(sorted(prompts, key=lambda key: (-len(prompts[key]), key)))
        started, done = time.perf_counter(), dict[int, Completion]()
        while True:
            for key in islice(waiting, max(2 * self.rows - self.engine.get_num_unfinished_requests(), 0)):
                self._add(key, prompts[key])
            if not self.engine.has_unfinished_requests():
                break
            done |= self._step(prompts)
            now = time.perf_counter()
            if done and (len(done) >= self.rows or now - started > SECONDS):
                yield self._group(prompts, done, now - started)
                started, done = time.perf_counter(), {}
        if done:
            yield self._group(prompts, done, time.perf_counter() - started)

    def _add(self, key: int, prompt: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Stop strings need all tokens after each step; without them, tokens are only read at the end.
        kind = RequestOutputKind.CUMULATIVE if self.stop else RequestOutputKind.FINAL_ONLY
        seed = stable_hash(self.seed, key) if self.params["temperature"] else None
        params = SamplingParams(**self.params, seed=seed, output_kind=kind)
        self.engine.add_request(str(key), {"prompt_token_ids": prompt}, params)

    def _step(self, prompts: Mapping[int, list[int]]) -> dict[int, Completion]:
        """Run one step of the engine, and return the completions that ended in it."""
        written = {}
        for output in self.engine.step():
            (choice,) = output.outputs
            written[int(output.request_id)] = (list(choice.token_ids), output.finished, choice.finish_reason)
        stopped = self._stopped({key: prompts[key] + tokens for key, (tokens, _, _) in written.items()})
        self.engine.abort_request([str(key) for key in stopped if not written[key][1]])
        return {
            key: self._completion(prompts[key], tokens, key in stopped or reason == "stop")
            for key, (tokens, finished, reason) in written.items()
            if finished or key in stopped
        }

    def _stopped(self, texts: Mapping[int, list[int]]) -> set[int]:
        """Return the keys whose text now ends with a stop string, by the criterion of ``model.generate``."""
        if self.stop is None or not texts:
            return set()
        width, pad = self.stop.maximum_token_len, self.tokenizer.pad_token_id
        ends = [ids[-width:] for ids in texts.values()]
        met = self.stop(torch.tensor([[pad] * (width - len(ids)) + ids for ids in ends]), None)
        return {key for key, is_met in zip(texts, met.tolist(), strict=True) if is_met}

    def _completion(self, prompt: list[int], tokens: list[int], stopped: bool) -> Completion:
        text = decode_behind(self.tokenizer, prompt, tokens)
        return Completion(text, len(tokens), "stop" if stopped else "length")

    def _group(self, prompts: Mapping[int, list[int]], done: Mapping[int, Completion], seconds: float) -> Batch:
        """Return keys, completions and their cost: without padding, each counts the steps it would take alone."""
        schedule, lengths = self.schedule, [len(prompts[key]) for key in done]
        steps = [row.tokens - 1 for row in done.values()]
        layer_steps = sum(sum(map(schedule.depth, range(count))) for count in steps)
        cost = GenerationStats(
            schedule.num_layers,
            rows=len(done),
            tokens=sum(row.tokens for row in done.values()),
            seconds=seconds,
            steps=sum(steps),
            layer_steps=layer_steps,
            row_layers=layer_steps,
            row_steps=sum(steps),
            prompt_positions=sum(lengths),
            prompt_layer_positions=sum(sum(schedule.positions_per_layer(length, length)) for length in lengths),
        )
        return [*done], [*done.values()], cost


def _engine(job: EngineConfig, config: Any, schedule: Schedule | None, positions: int) -> Any:
    """Make vLLM's engine, with the schedule if there is one. Raises ModelError if vLLM cannot run the model."""
    register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    one: dict[str, Any] = {CONFIG_KEY: {"schedule": schedule.to_dict()}} if schedule else {}
    if schedule and (folder := adapter_of(job.model, job.adapter)) is not None:
        one[CONFIG_KEY]["adapter"] = os.path.abspath(folder)
    try:
        made = EngineArgs(
            model=resolve(job.model),
            revision=job.revision,
            dtype=_dtype(placement(config, job.dtype, job.device)[0], config),
            max_model_len=positions,
            max_num_seqs=job.batch_size,
            # With chunked prompts and a seed, vLLM 0.32 crashes on CPUs, whose random generators have no offset.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(PROMPT_TOKENS, positions, job.batch_size),
            # The checkpoint's generation config and tokenizer are applied here, not by vLLM.
            generation_config="vllm",
            skip_tokenizer_init=True,
            enforce_eager=True,
            use_tqdm_on_load=False,
            disable_log_stats=True,
            additional_config=one,
            hf_overrides={} if schedule else {CONFIG_KEY: None},  # without a schedule: stock vLLM
        ).create_engine_config()
        if made.cache_config.kv_cache_memory_bytes is None:
            made.cache_config.kv_cache_memory_bytes = _kv_bytes(made, positions, job.batch_size)
        engine = LLMEngine.from_vllm_config(made, disable_log_stats=True)
    except SkipDecodeError:
        raise
    except (ValueError, OSError, SafetensorError) as error:
        raise ModelError(f"vLLM cannot run {job.model}: {_last_words(error)}") from error
    return engine


def _kv_bytes(config: Any, positions: int, rows: int) -> int:
    """Return the KV cache's size for ``rows`` texts, at most ``SHARE`` of free memory: vLLM would take nearly all."""
    model, block = config.model_config, config.cache_config.block_size or 128
    layer = (
        2 * model.get_total_num_kv_heads() * model.get_head_size() * torch.empty((), dtype=model.dtype).element_size()
    )
    blocks = rows * (positions // block + 1) + 2
    wanted = blocks * block * layer * num_layers(model.hf_config)
    return min(wanted, int(available_memory("cpu") * SHARE))


def _dtype(dtype: str | torch.dtype, config: Any) -> str:
    """Return a dtype's name, for ``auto`` the config's: vLLM's differs. Raises UsageError if the config has none."""
    found = config.dtype if dtype == "auto" else dtype
    if found is None:
        raise UsageError("dtype: the model's config names none: give float32, bfloat16 or float16")
    return str(found).removeprefix("torch.")


def _last_words(error: BaseException) -> str:
    """Return the message of vLLM's error in one line, without the heading and address that pydantic adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = next((line for line in lines if line.startswith("Value error, ")), lines[0])
    return said.removeprefix("Value error, ").partition(" [type=")[0]
