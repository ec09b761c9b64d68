"""A vLLM engine in this process, stepped by hand, and what our own ``generate`` writes for the same requests."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# One process: a test decides when a step happens, and reads the scheduler between two of them.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # on a GPU Triton would multiply float32 with 10 bits' precision

import torch

import skipdecode
from skipdecode import Schedule, SkipCache, attach
from skipdecode.loading.load import read_config
from skipdecode.model.adapter import read_schedules
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import CONFIG_KEY, config_schedules, schedule_for, set_entry

#: Room for keys and values of the tests' models.
KV_BYTES = 256 << 20


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, its speed-up, and the most new tokens."""

    prompt: tuple[int, ...]
    speedup: float
    new: int = 48


@dataclass
class Served:
    """What an engine did with requests, by their place in the list."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    mixed: int = 0
    steps: int = 0


class Reference:
    """What our own ``generate`` writes: float32, greedy, prompts in left-padded batches; each text computed once."""

    def __init__(self, folder: str | Path, most_new: int = 64) -> None:
        self.model, self.tokenizer = skipdecode.load(str(folder), device="cpu")
        attach(self.model)
        self.most_new = most_new
        self._known: dict[tuple[tuple[int, ...], Schedule], tuple[int, ...]] = {}

    def texts(
        self, requests: Sequence[Request], change: Callable[[Schedule], Schedule] = lambda schedule: schedule
    ) -> list[tuple[int, ...]]:
        """The tokens of each request, at most its ``new``; ``change`` is made to the checkpoint's schedules."""
        schedules = {r.speedup: change(schedule_for(self.model.config, r.speedup)) for r in requests}
        for speedup, schedule in schedules.items():
            wanted = {r.prompt for r in requests if r.speedup == speedup and (r.prompt, schedule) not in self._known}
            prompts = sorted(wanted, key=len)
            for at in range(0, len(prompts), 16):
                self._write(prompts[at : at + 16], schedule)
        return [self._known[r.prompt, schedules[r.speedup]][: r.new] for r in requests]

    @torch.no_grad()
    def _write(self, prompts: list[tuple[int, ...]], schedule: Schedule) -> None:
        width = max(map(len, prompts))
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        rows = self.model.generate(
            ids,
            attention_mask=mask,
            **{CACHE: SkipCache(self.model, schedule)},
            max_new_tokens=self.most_new,
            do_sample=False,
            num_beams=1,
        )
        for prompt, row in zip(prompts, rows[:, width:].tolist(), strict=True):
            self._known[prompt, schedule] = tuple(row[: row.index(end) + 1] if end in row else row)


def offering_full_depth(folder: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The ``additional_config`` among an engine's options, with 1x beside the trained speed-ups."""
    config, given = read_config(str(folder)), dict(options.get("additional_config", {}))
    set_entry(config, options.get("hf_overrides", {}).get(CONFIG_KEY, getattr(config, CONFIG_KEY, None)))
    own = given.get(CONFIG_KEY, {})
    stored = read_schedules(Path(own["adapter"])) if "adapter" in own else config_schedules(config)
    if stored and not own.keys() & {"schedule", "speedups"}:
        given[CONFIG_KEY] = own | {"speedups": sorted({1.0, *stored})}
    return given


@contextmanager
def engine(folder: str | Path, **options: Any) -> Iterator[Any]:
    """A vLLM engine in float32, eager unless the options say otherwise, gone with all it holds at the end."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": KV_BYTES,
        "gpu_memory_utilization": 0.1,  # a GPU may have other work
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    made = None
    try:
        chosen = defaults | options | {"additional_config": offering_full_depth(folder, options)}
        made = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **chosen))
        yield made
    finally:
        if made is not None:
            made.engine_core.shutdown()
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


def serve(
    made: Any,
    requests: Sequence[Request],
    *,
    arrive: Callable[[int], int] = lambda step: 1 << 30,
    abort: Callable[[int, int], bool] = lambda place, step: False,
    logprobs: int | None = None,
) -> Served:
    """Run requests to their end.

    Args:
        made: the engine.
        requests: in order of arrival.
        arrive: how many requests come in before a step.
        abort: whether the request at a place is given up before a step.
        logprobs: of each new token, as vLLM counts them.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    served = Served()
    names: dict[str, int] = {}
    run = f"{random.random():.9f}"
    while made.has_unfinished_requests() or len(names) < len(requests):
        for place in range(len(names), min(len(names) + arrive(served.steps), len(requests))):
            request = requests[place]
            params = SamplingParams(
                temperature=0.0, max_tokens=request.new, logprobs=logprobs, extra_args={"speedup": request.speedup}
            )
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
            names[made.add_request(f"{run}:{place}", prompt, params)] = place
        for place in list(names.values()):
            if place not in served.tokens and abort(place, served.steps):
                served.tokens[place] = ()
                made.abort_request([f"{run}:{place}"])
        for output in made.step():
            if output.finished:
                place = int(output.request_id.split(":")[1])
                served.tokens[place] = tuple(output.outputs[0].token_ids)
                served.cached[place] = output.num_cached_tokens or 0
                if logprobs is not None:
                    served.logprobs[place] = [
                        each[token].logprob
                        for each, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
                    ]
        served.steps += 1
    return served


def check_among_leavers(
    made: Any, requests: Sequence[Request], reference: Reference, source: random.Random, leave: float = 0.01
) -> None:
    """Requests come, and the share ``leave`` of them leaves, before any step: others' texts stay, no block is lost."""
    served = serve(
        made, requests, arrive=lambda step: source.choice((0, 1, 2)), abort=lambda *_: source.random() < leave
    )
    expected = reference.texts(requests)
    finished = [i for i in range(len(requests)) if served.tokens[i]]
    assert len(requests) // 4 < len(finished) < len(requests)
    assert [served.tokens[i] for i in finished] == [expected[i] for i in finished]
    pool = scheduler(made).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # vLLM's null block


def scheduler(made: Any) -> Any:
    """The engine's scheduler."""
    return made.engine_core.engine_core.scheduler


def runner(made: Any) -> Any:
    """The engine's model runner."""
    return made.model_executor.driver_worker.worker.model_runner
