"""Follows requests in vLLM's API server from start to end, for metrics, responses and the load policy.

Patches methods of the ``AsyncLLM`` *instance* and its processors. The plugin imports this module when vLLM creates an
``AsyncLLM`` for a model with schedules.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.entrypoints.openai.chat_completion import serving as chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models import serving as models
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from .load_policy import Load
from .metrics import count_finished, observe_times, show_load, work
from .patch import patch
from .requests import NAMED, OWN, SPEEDUP, bad_request, model_names, refuse_look_alikes, requested_speedup, take_name
from .settings import Serving
from .steps import Tables

logger = init_logger(f"vllm.{__name__}")  # a child of vLLM's logger has its handlers and level


def _logged_once(method: Any) -> Any:
    """Wrap a method that vLLM's loops call so that no exception leaves it; log the first one."""
    seen = False

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        nonlocal seen
        try:
            method(*args, **kwargs)
        except Exception:
            if not seen:
                logger.exception("skipdecode: figures of requests are incomplete from here on")
            seen = True

    return guarded


class Frontend:
    """Follows the requests of one API server.

    Args:
        serving: the server's settings.
        model_name: the name that the server gives the model, as a metrics label.
    """

    def __init__(self, serving: Serving, model_name: str) -> None:
        self.serving = serving
        self.load = None if serving.load is None else Load(self.requests, **serving.load)
        self.model_name = model_name
        self._tables = Tables(serving.schedules)
        #: The speed-ups by the names that stand for them.
        self._names: dict[str, float] = {}
        #: By vLLM's request id: the output processor's state, the speed-up, and whether the load policy raised it.
        self._followed: dict[str, tuple[Any, float, bool]] = {}
        self._died: bool | None = None  # whether the engine had, when it was first shut down

    def requests(self) -> tuple[int, int]:
        """Return how many requests wait for their first token, and how many have it."""
        states = list(self._followed.values())  # a copy: other threads of vLLM call this too
        waiting = sum(state.is_prefilling for state, _, _ in states)
        return waiting, len(states) - waiting

    def stat_loggers(self) -> list[Any]:
        """Return factories of vLLM's stat loggers: one that passes token times to the load policy, none without it."""
        return [] if self.load is None else [functools.partial(TokenTimes, self.load)]

    def follow(self, client: Any) -> None:
        """Patch the processors of an ``AsyncLLM`` to report its requests here, and vLLM's responses to show them."""
        client.input_processor.skipdecode, client.input_processor.skipdecode_load = self.serving, self.load
        processor = client.output_processor
        self._states = processor.request_states
        patch(processor, "add_request", self._add_request)
        patch(processor, "_update_stats_from_finished", self._update_stats_from_finished)
        patch(processor, "abort_requests", self._abort_requests)
        patch(client, "shutdown", functools.partial(self._shutdown, client))
        for request in (CompletionRequest, ChatCompletionRequest, ResponsesRequest):
            patch(request, "to_sampling_params", self._to_sampling_params)
        patch(models.OpenAIServingModels, "__init__", self._init_models)
        patch(models.OpenAIModelRegistry, "is_base_model", self._is_base_model)
        for module in (completion, chat_completion):
            patch(module, "build_per_request_timing_metrics", _timing_metrics)

    def _init_models(self, original: Any, served: Any, *, base_model_paths: list[Any], **kwargs: Any) -> None:
        """Add to the model's names, for each, those of its speed-ups."""
        paths = list(base_model_paths)
        for path in base_model_paths:
            names = model_names(path.name, self.serving)
            paths += [type(path)(name=name, model_path=path.model_path) for name in names]
            self._names |= names
        original(served, base_model_paths=paths, **kwargs)

    def _is_base_model(self, original: Any, registry: Any, name: str) -> bool:
        """Answer as vLLM does, which asks this of each request's model in the task that answers the request."""
        NAMED.set(self._names.get(name))
        return original(registry, name)

    def _to_sampling_params(self, original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as vLLM does, and take the speed-up: the task that streams a response no longer knows the model's name.

        A top-level field ``speedup`` is refused: the OpenAI API would accept and ignore it.
        """
        with bad_request():
            refuse_look_alikes(request.model_extra or ())
            params = original(request, *args, **kwargs)
            take_name(params)
            requested_speedup(params, self.serving)
        return params

    def _add_request(self, original: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(request, *args, **kwargs)
        self._begin(request)

    def _update_stats_from_finished(self, original: Any, state: Any, reason: Any, stats: Any) -> None:
        original(state, reason, stats)
        self._end(state.request_id, str(reason))

    def _abort_requests(self, original: Any, request_ids: Any, internal: bool) -> Any:
        aborted = original(request_ids, internal)
        for name in aborted:
            self._end(name, "abort")
        return aborted

    def _shutdown(self, client: Any, original: Any, *args: Any, **kwargs: Any) -> None:
        """Do as vLLM does; after an engine that died, end with code 1: with vLLM's 0, nobody would restart it."""
        if self._died is None:
            self._died = client.errored
        original(*args, **kwargs)
        if self._died:
            raise SystemExit(1)

    @_logged_once
    def _begin(self, request: Any) -> None:
        """Start to follow a request, if the plugin has given it a speed-up."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        if OWN in extra:
            state = self._states[request.request_id]
            self._followed[request.request_id] = state, extra[SPEEDUP], extra[OWN]["moved"]

    @_logged_once
    def _end(self, name: str, reason: str) -> None:
        """Count the request ``name`` once, and attach its summary to vLLM's statistics, where the response reads it."""
        if name not in self._followed:
            return
        state, speedup, moved = self._followed.pop(name)
        new = state.detokenizer.num_output_tokens()
        # Before the first token, this process does not know how much of the prompt has run: count none.
        cached = state.num_cached_tokens if new else state.prompt_len
        ran = work(self._tables.of(speedup), state.prompt_len, cached, new)
        summary = {"speedup": speedup, "moved": moved} | ran
        count_finished(self.model_name, summary, reason, new)
        if self.load is not None:
            show_load(self.model_name, self.load)
        if state.stats is not None:
            state.stats.skipdecode = summary
            writing = state.stats.last_token_ts - state.stats.first_token_ts
            if new:
                between = writing / (new - 1) if new > 1 else None
                observe_times(self.model_name, speedup, state.stats.first_token_latency, between)


class TokenTimes(StatLoggerBase):
    """Passes the times between tokens, as vLLM measures them, to the load policy."""

    def __init__(self, load: Load, vllm_config: Any, engine_index: int = 0) -> None:
        self.load = load

    @_logged_once
    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Pass the times between tokens in one step to the load policy."""
        if iteration_stats is not None:
            self.load.tokens(iteration_stats.inter_token_latencies_iter)

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls this when it logs that the engine is ready."""


def _timing_metrics(original: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
    """Add our summary to the ``metrics`` of a response."""
    made = original(metrics, *args, **kwargs)
    if (summary := getattr(metrics, "skipdecode", None)) is not None:
        made.skipdecode = summary
    return made
