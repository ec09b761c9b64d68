"""In vLLM's API server: requests are followed from their start to their end, for metrics, responses and load.

``AsyncLLM`` and its output processor are objects of this process, so methods of these *instances* are stood in for;
nothing is for a model without schedules. Imported by the plugin where an ``AsyncLLM`` is made.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion import serving as chat_completion
from vllm.entrypoints.openai.completion import serving as completion
from vllm.exceptions import VLLMValidationError
from vllm.v1.metrics.loggers import StatLoggerBase

from .depths import Table
from .metrics import Counters, Work
from .policy import Load
from .requests import OWN, SPEEDUP
from .settings import Serving


class Frontend:
    """What one API server knows of its own requests.

    Args:
        serving: the server's settings.
        model_name: as it is served.
    """

    def __init__(self, serving: Serving, model_name: str) -> None:
        self.serving = serving
        self.load = None if serving.limits is None else Load(serving.limits, self.requests)
        self._counters = Counters(model_name)
        self._table = functools.cache(lambda speedup: Table(serving.schedule(speedup)))
        #: By vLLM's own request id: its state, and our part of its parameters.
        self._followed: dict[str, tuple[Any, float, bool]] = {}

    def requests(self) -> tuple[int, int]:
        """How many requests wait for their first token, and how many have it."""
        states = list(self._followed.values())  # vLLM's threads ask too
        waiting = sum(state.is_prefilling for state, _, _ in states)
        return waiting, len(states) - waiting

    def stat_loggers(self) -> list[Any]:
        """For vLLM's argument of this name: what tells the load policy how far apart tokens come."""
        if self.load is None or self.load.limits.token_ms is None:
            return []
        return [functools.partial(TokenTimes, self.load)]

    def follow(self, client: Any) -> None:
        """Stand in for methods of an ``AsyncLLM``'s processors."""
        client.input_processor.skipdecode, client.input_processor.skipdecode_load = self.serving, self.load
        processor = client.output_processor
        add, end, abort = processor.add_request, processor._update_stats_from_finished, processor.abort_requests

        @functools.wraps(add)
        def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
            add(request, *args, **kwargs)
            extra = getattr(request.sampling_params, "extra_args", None) or {}
            if OWN in extra:
                state = processor.request_states[request.request_id]
                self._followed[request.request_id] = state, extra[SPEEDUP], extra[OWN]["moved"]

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
        _stand_in()

    def _end(self, name: str, reason: str) -> None:
        """Count a request once; its response finds the summary with vLLM's own figures."""
        if name not in self._followed:
            return
        state, speedup, moved = self._followed.pop(name)
        new = state.detokenizer.num_output_tokens()
        # Before its first token nobody here knows how much of the prompt was run, if any.
        cached = state.prompt_len if state.is_prefilling else state.num_cached_tokens
        work = Work.of(self._table(speedup), state.prompt_len, cached, new)
        self._counters.finished(speedup, reason, moved, work, self.serving.num_layers, new)
        if self.load is not None:
            self._counters.load(self.load)
        if state.stats is not None:
            state.stats.skipdecode = work.summary(speedup, self.serving.num_layers) | {"moved": moved}


class TokenTimes(StatLoggerBase):
    """Hands the times between tokens, which vLLM measures, to the load policy."""

    def __init__(self, load: Load, vllm_config: Any, engine_index: int = 0) -> None:
        self.load = load

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """One step's outputs came."""
        if iteration_stats is not None:
            self.load.tokens(iteration_stats.inter_token_latencies_iter)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


@functools.cache
def _stand_in() -> None:
    """What is no instance's: once per process."""
    for module in (completion, chat_completion):
        module.build_per_request_timing_metrics = _with_layers(module.build_per_request_timing_metrics)
    BeamSearchOnlineMixin.beam_search = _without_beams(BeamSearchOnlineMixin.beam_search)


def _with_layers(found: Any) -> Any:
    """The response's ``metrics``, with ours beside vLLM's."""

    @functools.wraps(found)
    def build_per_request_timing_metrics(metrics: Any, *args: Any, **kwargs: Any) -> Any:
        made = found(metrics, *args, **kwargs)
        if (summary := getattr(metrics, "skipdecode", None)) is not None:
            made.skipdecode = summary
        return made

    return build_per_request_timing_metrics


def _without_beams(found: Any) -> Any:
    """vLLM makes every step of a beam a new request, whose whole text is a prompt: it would run no schedule."""

    @functools.wraps(found)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.engine_client.input_processor.skipdecode is not None:
            raise VLLMValidationError(
                "beam search runs no schedule in vLLM: leave it out, or use skipdecode generate --num-beams",
                parameter="use_beam_search",
            )
        return found(self, *args, **kwargs)

    return beam_search
