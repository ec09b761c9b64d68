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

import pytest
import torch

import skipdecode
from skipdecode import Schedule
from skipdecode.loading.load import DEMO
from skipdecode.model.config import CONFIG_KEY, trained_schedules
from skipdecode.schedule import choose_schedule

SPEEDUPS = (1.0, 2.0, 3.0, 5.0)
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

    def texts(self) -> list[tuple[int, ...]]:
        """The tokens of all requests, in their order."""
        return [self.tokens[place] for place in range(len(self.tokens))]


class Reference:
    """What our own ``generate`` writes: float32, greedy, prompts in left-padded batches; each text computed once."""

    def __init__(self, folder: str | Path = "demo", most_new: int = 64) -> None:
        self.model, self.tokenizer = skipdecode.load(str(folder), device="cpu")
        self.most_new = most_new
        self._known: dict[tuple[tuple[int, ...], Schedule], tuple[int, ...]] = {}

    def schedule(self, speedup: float) -> Schedule:
        """The schedule that a server runs at a speed-up."""
        trained = trained_schedules(self.model)
        return choose_schedule(trained, self.model.config.num_hidden_layers, speedup)

    def texts(
        self, requests: Sequence[Request], change: Callable[[Schedule], Schedule] = lambda schedule: schedule
    ) -> list[tuple[int, ...]]:
        """The tokens of each request, at most its ``new``; ``change`` is made to the schedules."""
        schedules = {r.speedup: change(self.schedule(r.speedup)) for r in requests}
        for speedup, schedule in schedules.items():
            wanted = {r.prompt for r in requests if r.speedup == speedup and (r.prompt, schedule) not in self._known}
            prompts = sorted(wanted, key=len)
            for start in range(0, len(prompts), 16):
                self._write(prompts[start : start + 16], schedule)
        return [self._known[r.prompt, schedules[r.speedup]][: r.new] for r in requests]

    @torch.no_grad()
    def _write(self, prompts: list[tuple[int, ...]], schedule: Schedule) -> None:
        width = max(map(len, prompts))
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        skipdecode.attach(self.model, schedule=schedule)
        options: dict[str, Any] = {"max_new_tokens": self.most_new, "do_sample": False, "num_beams": 1}
        rows = self.model.generate(ids, attention_mask=mask, **options)
        for prompt, row in zip(prompts, rows[:, width:].tolist(), strict=True):
            self._known[prompt, schedule] = tuple(row[: row.index(end) + 1] if end in row else row)


def demo_texts() -> list[str]:
    """Prompts as the demo model knows them."""
    lines = (DEMO / "inputs.csv").read_text(encoding="utf-8").splitlines()[1:41]
    return [(line.split('"')[1] if line.startswith('"') else line) + " ->" for line in lines]


def demo_prompts(reference: Reference) -> list[tuple[int, ...]]:
    """These as token ids, and ids at random: from one token to 90."""
    source = random.Random(0)
    rows = [tuple(reference.tokenizer(text)["input_ids"]) for text in demo_texts()]
    return rows + [tuple(source.choices(range(3, 1000), k=source.randint(1, 90))) for _ in range(24)]


def requests_of(
    prompts: Sequence[tuple[int, ...]], count: int, seed: int, speedups: Sequence[float] = SPEEDUPS, most: int = 64
) -> list[Request]:
    """Requests with random prompts of these, speed-ups and lengths."""
    source = random.Random(seed)
    return [
        Request(source.choice(prompts), source.choice(speedups), source.randint(most // 4, most)) for _ in range(count)
    ]


@contextmanager
def engine(
    folder: str | Path = DEMO, skipdecode: Mapping[str, Any] | None = None, *, stock: bool = False, **options: Any
) -> Iterator[Any]:
    """A vLLM engine in float32, eager unless vLLM's ``options`` say otherwise, gone with all it holds at the end.

    ``skipdecode`` are the plugin's options beside ``speedups``, which are :data:`SPEEDUPS`; ``stock``: without it.
    """
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
    if stock:
        defaults["hf_overrides"] = {CONFIG_KEY: None}
    else:
        defaults["additional_config"] = {CONFIG_KEY: {"speedups": [*SPEEDUPS], **(skipdecode or {})}}
    made = None
    try:
        made = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **defaults | options))
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
    abort: Callable[[], bool] = lambda: False,
    logprobs: int | None = None,
    **sampling: Any,
) -> Served:
    """Run requests, in order of arrival, to their end.

    Args:
        made: the engine.
        requests: in order of arrival.
        arrive: how many requests come in before a step.
        abort: whether a request is given up before a step; its text is then ().
        logprobs: of each new token, as vLLM counts them.
        sampling: further sampling parameters; a seed is added to the request's place.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    served = Served()
    names: dict[str, int] = {}
    run = f"{random.random():.9f}"
    seed = sampling.pop("seed", None)
    options: dict[str, Any] = {"temperature": 0.0, "logprobs": logprobs} | sampling
    step = 0
    while made.has_unfinished_requests() or len(names) < len(requests):
        for place in range(len(names), min(len(names) + arrive(step), len(requests))):
            request = requests[place]
            options |= {"max_tokens": request.new, "seed": None if seed is None else seed + place}
            params = SamplingParams(**options, extra_args={"speedup": request.speedup})
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
            names[made.add_request(f"{run}:{place}", prompt, params)] = place
        for place in names.values():
            if place not in served.tokens and abort():
                served.tokens[place] = ()
                made.abort_request([f"{run}:{place}"])
        for output in made.step():
            if output.finished:
                place = int(output.request_id.split(":")[1])
                choice = output.outputs[0]
                served.tokens[place] = tuple(choice.token_ids)
                served.cached[place] = output.num_cached_tokens or 0
                if logprobs is not None:
                    rows = zip(choice.logprobs, choice.token_ids, strict=True)
                    served.logprobs[place] = [row[token].logprob for row, token in rows]
        step += 1
    return served


def check_among_leavers(
    made: Any, requests: Sequence[Request], texts: Sequence[tuple[int, ...]], seed: int, leaving: float = 0.01
) -> None:
    """Requests come, and some leave, before any step: the others' texts stay, and no block is lost."""
    source = random.Random(seed)
    served = serve(made, requests, arrive=lambda _: source.choice((0, 1, 2)), abort=lambda: source.random() < leaving)
    finished = [place for place in range(len(requests)) if served.tokens[place]]
    assert len(requests) // 4 < len(finished) < len(requests)
    assert [served.tokens[place] for place in finished] == [texts[place] for place in finished]
    check_no_block_is_lost(made)


def check_no_block_is_lost(made: Any) -> None:
    """All blocks are free but vLLM's null block."""
    pool = scheduler(made).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def scheduler(made: Any) -> Any:
    """The engine's scheduler."""
    return made.engine_core.engine_core.scheduler


def runner(made: Any) -> Any:
    """The engine's model runner."""
    return made.model_executor.driver_worker.worker.model_runner


def count_calls(owner: Any, name: str, patch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by an item with each call of a function."""
    calls: list[None] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    patch.setattr(owner, name, counted)
    return calls


def check_layers(made: Any) -> None:
    """The gates ran less than the full model; each step checks that it ran as planned."""
    context = runner(made).skip_context
    assert 0 < context.run_tokens < context.full_tokens
