"""Layer-tokens (one token in one layer) and times of requests, for responses, Prometheus and the load policy."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from .load_policy import Load
from .patch import patch
from .requests import apply_model_name, bad_request, own_arguments, refuse_beams, requested_speedup
from .settings import Serving
from .steps import DepthTable, DepthTables

LABELS = ("model_name", "speedup")


class RequestMetrics:
    """One API server's requests: the speeds that their model names ask for, their metrics, and the load policy."""

    def __init__(self, serving: Serving, model_name: str) -> None:
        self.serving = serving
        self.load = None if serving.load is None else Load(self.requests, **serving.load)
        self.model_name = model_name
        self.override: dict[str, Any] = {}  # the operator's ``--override-generation-config``
        self._tables = DepthTables(serving.schedules)
        self._states: dict[str, Any] = {}  # vLLM's states of requests that have not ended

    def requests(self) -> tuple[int, int]:
        """How many requests wait for their first token, and how many have it."""
        states = tuple(self._states.values())  # a copy: other threads of vLLM call this too
        waiting = sum(state.is_prefilling for state in states)
        return waiting, len(states) - waiting

    def follow(self, client: Any) -> None:
        """Patch an ``AsyncLLM`` to report its requests here, and vLLM's protocols to name and show speed-ups."""
        from vllm.entrypoints.openai.chat_completion import serving as chat_completion
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion import serving as completion
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        client.input_processor.skipdecode_load = self.load
        self.override = client.model_config.override_generation_config
        self._states = client.output_processor.request_states
        patch(client.output_processor, "add_request", self._add_request)
        patch(client.output_processor, "_update_stats_from_finished", self._finish)
        for request in (CompletionRequest, ChatCompletionRequest, ResponsesRequest):
            patch(request, "to_sampling_params", self._to_sampling_params)
        for request in (CompletionRequest, ChatCompletionRequest):
            patch(request, "to_beam_search_params", refuse_beams)
        for module in (completion, chat_completion):
            patch(module, "build_per_request_timing_metrics", _timing_metrics)

    def _to_sampling_params(self, original: Any, request: Any, max_tokens: int, defaults: Any = None) -> Any:
        """Take the speed-up from the model's name; a bad one is HTTP 400 before a response starts.

        Where layers are skipped, the adapter's sampling comes before the model's, and behind the operator's.
        """
        asked = SimpleNamespace(extra_args=request.vllm_xargs)
        with bad_request():
            apply_model_name(asked, request.model)
            speedup = requested_speedup(asked, self.serving) or self.serving.default
        request.vllm_xargs = asked.extra_args
        if not self.serving.schedules[speedup].is_full:
            defaults = {**(defaults or {}), **self.serving.sampling, **self.override}
        return original(request, max_tokens, defaults)

    def _add_request(self, original: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(request, *args, **kwargs)
        self._states[request.request_id].skipdecode = own_arguments(request.sampling_params)

    def _finish(self, original: Any, state: Any, reason: Any, stats: Any) -> None:
        """After vLLM's own handler of a finished request: count it, and put its summary where the response reads it."""
        original(state, reason, stats)
        own = state.skipdecode
        if own is None:
            return
        new = state.detokenizer.num_output_tokens()
        # Before the first token, this process does not know how much of the prompt has run: count none.
        cached = state.num_cached_tokens if new else state.prompt_len
        counts = layer_tokens(self._tables.of(own["speedup"]), state.prompt_len, cached, new)
        metrics = _prometheus()
        labels = (self.model_name, f"{own['speedup']:g}")
        metrics["requests"].labels(*labels, str(reason)).inc()
        metrics["tokens"].labels(*labels).inc(new)
        metrics["moved"].labels(*labels).inc(own["moved"])
        for phase in ("prompt", "decode"):
            metrics["layer_tokens"].labels(*labels, phase).inc(counts[f"{phase}_layer_tokens"]["run"])
            metrics["full_layer_tokens"].labels(*labels, phase).inc(counts[f"{phase}_layer_tokens"]["of"])
        if self.load is not None:
            metrics["token_ms"].labels(self.model_name).set(self.load.token_ms())  # refresh may reset it
            metrics["load"].labels(self.model_name).set(self.load.refresh())
        times = state.stats
        if times is None:
            return
        times.skipdecode = {"speedup": own["speedup"], "moved": own["moved"]} | counts
        if new:
            metrics["first"].labels(*labels).observe(times.first_token_latency)
        if new > 1:
            metrics["between"].labels(*labels).observe((times.last_token_ts - times.first_token_ts) / (new - 1))


def token_times(load: Load) -> Any:
    """Factory of a vLLM stat logger that passes the times between tokens to the load policy."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class TokenTimes(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            if iteration_stats is not None:
                load.record(iteration_stats.inter_token_latencies_iter)

        def log_engine_initialized(self) -> None:
            pass

    return TokenTimes


def layer_tokens(table: DepthTable, prompt: int, cached: int, new: int) -> dict[str, Any]:
    """Layer-tokens that one request ran, as responses report them; ``of`` is what the full model would have run.

    Tokens computed again after a preemption count once, those from the prefix cache not at all. The last of the ``new``
    tokens is not fed back.
    """
    ran = prompt - cached
    steps = max(new - 1, 0)
    layers = table.runs.shape[1]
    depths = table.runs.sum(axis=1)[table.rows(np.arange(-ran, steps))]
    return {
        "prompt_tokens": ran,
        "prompt_layer_tokens": {"run": int(depths[:ran].sum()), "of": ran * layers},
        "decode_steps": steps,
        "decode_layer_tokens": {"run": int(depths[ran:].sum()), "of": steps * layers},
    }


@cache
def _prometheus() -> dict[str, Any]:
    """Prometheus metrics, made once per process, after vLLM has set where several servers merge theirs."""
    from prometheus_client import Counter, Gauge, Histogram

    def counter(name: str, text: str, *more: str) -> Any:
        return Counter(f"skipdecode_{name}", text, (*LABELS, *more))

    def seconds(name: str, text: str, least: float, factor: float) -> Any:
        buckets = [least * factor**place for place in range(18)]
        return Histogram(f"skipdecode_{name}_seconds", text, LABELS, buckets=buckets)

    def gauge(name: str, text: str, mode: Any) -> Any:
        return Gauge(f"skipdecode_{name}", text, ["model_name"], multiprocess_mode=mode)

    return {
        "requests": counter("requests", "Requests that ended.", "finished_reason"),
        "tokens": counter("generation_tokens", "Tokens of requests that ended."),
        "moved": counter("moved_requests", "Requests that the load policy made faster."),
        "layer_tokens": counter("layer_tokens", "Tokens times layers that ran.", "phase"),
        "full_layer_tokens": counter("full_layer_tokens", "The same of the full model.", "phase"),
        "first": seconds("time_to_first_token", "Time to first token, of requests that ended.", 0.01, 1.7),
        "between": seconds("inter_token", "Mean time between tokens of each request that ended.", 0.002, 1.5),
        "load": gauge("under_load", "API servers under load.", "livesum"),
        "token_ms": gauge("token_milliseconds", "Mean time between tokens, as the load policy sees it.", "livemax"),
    }


def _timing_metrics(original: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
    """Add our summary to the ``metrics`` of a response."""
    timing = original(metrics, *args, **kwargs)
    if hasattr(metrics, "skipdecode"):
        timing.skipdecode = metrics.skipdecode
    return timing
