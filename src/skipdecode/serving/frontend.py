"""Follows requests in vLLM's API server from start to end, for metrics, responses and the load policy.

Patches methods of the ``AsyncLLM`` *instance* and its processors. The plugin imports this module when vLLM creates an
``AsyncLLM`` for a model with schedules.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion import serving as chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from ..errors import ScheduleError
from .depths import Tables
from .metrics import Counters, Work
from .policy import Load
from .requests import OWN, SPEEDUP, refuse_look_alikes
from .settings import Serving

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
        self.load = None if serving.limits is None else Load(serving.limits, self.requests)
        self._counters = Counters(model_name)
        self._tables = Tables(serving.schedules)
        #: By vLLM's request id: the output processor's state, the speed-up, and whether the load policy raised it.
        self._followed: dict[str, tuple[Any, float, bool]] = {}

    def requests(self) -> tuple[int, int]:
        """Count the requests that wait for their first token, and those that have it."""
        states = list(self._followed.values())  # a copy: other threads of vLLM call this too
        waiting = sum(state.is_prefilling for state, _, _ in states)
        return waiting, len(states) - waiting

    def stat_loggers(self) -> list[Any]:
        """Return factories for vLLM's argument of this name: their logger passes token times to the load policy."""
        if self.load is None or self.load.limits.token_ms is None:
            return []
        return [functools.partial(TokenTimes, self.load)]

    def follow(self, client: Any) -> None:
        """Patch the processors of an ``AsyncLLM`` to report its requests here."""
        client.input_processor.skipdecode, client.input_processor.skipdecode_load = self.serving, self.load
        processor = client.output_processor
        add, end, abort = processor.add_request, processor._update_stats_from_finished, processor.abort_requests

        @functools.wraps(add)
        def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
            add(request, *args, **kwargs)
            self._begin(request, processor.request_states)

        @functools.wraps(end)
        def update_stats_from_finished(state: Any, reason: Any, stats: Any) -> None:
            end(state, reason, stats)
            self._end(state.request_id, str(reason))

        @functools.wraps(abort)
        def abort_requests(request_ids: Any, internal: bool) -> Any:
            aborted = abort(request_ids, internal)
            for name in aborted:
                self._end(name, "abort")
            return aborted

        processor.add_request, processor.abort_requests = add_request, abort_requests
        processor._update_stats_from_finished = update_stats_from_finished
        _patch_classes()

    @_logged_once
    def _begin(self, request: Any, states: Any) -> None:
        """Start to follow a request, if the plugin has given it a speed-up."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        if OWN in extra:
            self._followed[request.request_id] = states[request.request_id], extra[SPEEDUP], extra[OWN]["moved"]

    @_logged_once
    def _end(self, name: str, reason: str) -> None:
        """Count a request once, and attach its summary to vLLM's statistics, where the response reads it."""
        if name not in self._followed:
            return
        state, speedup, moved = self._followed.pop(name)
        new = state.detokenizer.num_output_tokens()
        # Before the first token, this process does not know how much of the prompt has run: count none.
        cached = state.num_cached_tokens if new else state.prompt_len
        work = Work.of(self._tables.of(speedup), state.prompt_len, cached, new)
        self._counters.finished(speedup, reason, moved, work, self.serving.num_layers, new)
        if self.load is not None:
            self._counters.load(self.load)
        if state.stats is not None:
            state.stats.skipdecode = work.summary(speedup, self.serving.num_layers) | {"moved": moved}


class TokenTimes(StatLoggerBase):
    """Passes the times between tokens, as vLLM measures them, to the load policy."""

    def __init__(self, load: Load, vllm_config: Any, engine_index: int = 0) -> None:
        self.load = load

    @_logged_once
    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Pass on the times of one step."""
        if iteration_stats is not None:
            self.load.tokens(iteration_stats.inter_token_latencies_iter)

    def log_engine_initialized(self) -> None:
        """Do nothing."""


@functools.cache
def _patch_classes() -> None:
    """Patch vLLM's classes and modules, once per process."""
    for request in (CompletionRequest, ChatCompletionRequest, ResponsesRequest):
        request.to_sampling_params = _patched_to_sampling_params(request.to_sampling_params)
    for module in (completion, chat_completion):
        module.build_per_request_timing_metrics = _patched_timing_metrics(module.build_per_request_timing_metrics)
    BeamSearchOnlineMixin.beam_search = _patched_beam_search(BeamSearchOnlineMixin.beam_search)


def _patched_timing_metrics(original: Any) -> Any:
    """Add our summary to the ``metrics`` of a response."""

    @functools.wraps(original)
    def build_per_request_timing_metrics(metrics: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(metrics, *args, **kwargs)
        if (summary := getattr(metrics, "skipdecode", None)) is not None:
            made.skipdecode = summary
        return made

    return build_per_request_timing_metrics


def _patched_to_sampling_params(original: Any) -> Any:
    """Refuse ``speedup`` as a top-level field of a request: the OpenAI API would accept and ignore it."""

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            refuse_look_alikes(self.model_extra or ())
        except ScheduleError as error:
            raise VLLMValidationError(str(error), parameter=SPEEDUP) from None
        return original(self, *args, **kwargs)

    return to_sampling_params


def _patched_beam_search(original: Any) -> Any:
    """Refuse beam search: vLLM runs each of its steps as a new request, which would follow no schedule."""

    @functools.wraps(original)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.engine_client.input_processor.skipdecode is not None:
            raise VLLMValidationError(
                "beam search runs no schedule in vLLM: leave it out, or use skipdecode generate --num-beams",
                parameter="use_beam_search",
            )
        return original(self, *args, **kwargs)

    return beam_search
