"""Counts layers times tokens, for a request's response, for Prometheus and for the log. No vLLM here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .depths import Table
from .gate import Plan
from .policy import Load


@dataclass(frozen=True)
class Work:
    """Tokens that passed through the model, and layers that they ran: a layer-token is one token in one layer.

    The last token of a text is written and not read, so a text of ``n`` tokens takes ``n - 1`` decode steps. What the
    prefix cache had counts as no work. What is computed twice, after a preemption, counts once.
    """

    prompt_tokens: int
    prompt_layer_tokens: int
    decode_steps: int
    decode_layer_tokens: int

    @classmethod
    def of(cls, table: Table, prompt: int, cached: int, new: int) -> Work:
        """The work of one request.

        Args:
            table: of its schedule.
            prompt: tokens of its prompt.
            cached: of these, how many came from the prefix cache.
            new: tokens written.
        """
        steps = np.arange(min(cached, prompt) - prompt, max(new - 1, 0))
        layers = table.runs.sum(axis=1)[table.rows(steps)]
        inside = steps < 0
        return cls(int(inside.sum()), int(layers[inside].sum()), int((~inside).sum()), int(layers[~inside].sum()))

    def summary(self, speedup: float, num_layers: int) -> dict[str, Any]:
        """As a response gives it; ``of`` is what the model's full depth would have run."""
        return {
            "speedup": speedup,
            "prompt_tokens": self.prompt_tokens,
            "prompt_layer_tokens": {"run": self.prompt_layer_tokens, "of": self.prompt_tokens * num_layers},
            "decode_steps": self.decode_steps,
            "decode_layer_tokens": {"run": self.decode_layer_tokens, "of": self.decode_steps * num_layers},
        }


class LayerLog:
    """Logs now and then how much of the model the steps ran, beside vLLM's own line of figures.

    Args:
        plan: counts.
        seconds: from one line to the next, at least. Without steps there is none.
        write: takes a line.
        clock: seconds that only grow.
    """

    def __init__(
        self, plan: Plan, seconds: float, write: Callable[[str], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plan, self._seconds, self._write, self._clock = plan, seconds, write, clock
        self._since, self._before = clock(), plan.counted()

    def step(self) -> None:
        """A step has ended."""
        now = self._clock()
        if now - self._since < self._seconds:
            return
        counted = self._plan.counted()
        new = {name: value - self._before[name] for name, value in counted.items()}
        layers = new["steps"] * self._plan.num_layers
        self._write(
            f"skipdecode: {new['run'] / new['full']:.1%} of full depth's layer-tokens run, "
            f"{new['needed'] / new['full']:.1%} needed; steps entered {new['entered'] / layers:.1%} of the layers "
            f"(last {now - self._since:.0f} s, {new['steps']} steps)"
        )
        self._since, self._before = now, counted


class Counters:
    """Counters for Prometheus, by speed-up; safe with several API servers, as vLLM's own are."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def finished(self, speedup: float, reason: str, moved: bool, work: Work, num_layers: int, new: int) -> None:
        """One text ended: by itself, at its greatest length, or because its client left."""
        made, labels = _collectors(), (self.model_name, f"{speedup:g}")
        made["requests"].labels(*labels, reason).inc()
        made["tokens"].labels(*labels).inc(new)
        if moved:
            made["moved"].labels(*labels).inc()
        for phase, run, tokens in (
            ("prompt", work.prompt_layer_tokens, work.prompt_tokens),
            ("decode", work.decode_layer_tokens, work.decode_steps),
        ):
            made["layer_tokens"].labels(*labels, phase).inc(run)
            made["full_layer_tokens"].labels(*labels, phase).inc(tokens * num_layers)

    def load(self, load: Load) -> None:
        """What the load policy sees."""
        _collectors()["token_ms"].labels(self.model_name).set(load.token_ms())  # an idle server forgets it
        _collectors()["load"].labels(self.model_name).set(load.refresh())


@cache
def _collectors() -> dict[str, Any]:
    """Made once per process, after vLLM has said where several API servers put their numbers together."""
    from prometheus_client import Counter, Gauge

    labels = ("model_name", "speedup")
    return {
        "requests": Counter("skipdecode_requests", "Texts that ended, by why.", (*labels, "finished_reason")),
        "tokens": Counter("skipdecode_generation_tokens", "Tokens of texts that ended.", labels),
        "moved": Counter("skipdecode_moved_requests", "Texts that the load policy made faster.", labels),
        "layer_tokens": Counter("skipdecode_layer_tokens", "Tokens times layers that ran.", (*labels, "phase")),
        "full_layer_tokens": Counter(
            "skipdecode_full_layer_tokens", "Tokens times layers at full depth.", (*labels, "phase")
        ),
        "load": Gauge("skipdecode_under_load", "API servers under load.", ("model_name",), multiprocess_mode="livesum"),
        "token_ms": Gauge(
            "skipdecode_token_milliseconds",
            "Mean time between a request's tokens, as the load policy sees it.",
            ("model_name",),
            multiprocess_mode="livemax",
        ),
    }
