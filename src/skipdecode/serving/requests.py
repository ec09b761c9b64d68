"""Passes a request's speed-up from the client to the scheduler and workers, in ``extra_args`` of its parameters.

A client names it as an argument, or by the model's name: ``NAME:3x`` is the model NAME at 3x.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import ScheduleError
from .buckets import retirements
from .load_policy import Load
from .settings import Serving

#: The argument that a client sets (``vllm_xargs`` of the OpenAI API, ``extra_args`` of SamplingParams).
SPEEDUP = "speedup"
#: What the model's name in the HTTP request asks for that the current task answers; None: the name asks for none.
NAMED: ContextVar[float | None] = ContextVar("named", default=None)
#: The argument that we add when a request enters, so that other processes need no settings.
OWN = "skipdecode"


def model_names(name: str, serving: Serving) -> dict[str, float]:
    """Return the names of a model at each speed-up that the server offers."""
    return {f"{name}:{speedup:g}x": speedup for speedup in serving.schedules}


def take_name(params: Any) -> None:
    """Write what the model's name asks for into a request's parameters. Raises ScheduleError if they ask otherwise."""
    if (named := NAMED.get()) is None:
        return
    extra = params.extra_args or {}
    if extra.get(SPEEDUP, named) != named:
        raise ScheduleError(f"the model's name asks for {named:g}x and vllm_xargs for {extra[SPEEDUP]}: leave one out")
    params.extra_args = extra | {SPEEDUP: named}


def requested_speedup(params: Any, serving: Serving) -> tuple[float, bool]:
    """Return a request's speed-up without load, and whether it named one. Raises ScheduleError for one not offered."""
    extra = params.extra_args or {}
    refuse_look_alikes(name for name in extra if name != SPEEDUP)
    asked = extra.get(SPEEDUP)
    return (serving.default if asked is None else serving.speedup(asked)), asked is not None


def refuse_look_alikes(names: Iterable[str]) -> None:
    """Raise ScheduleError for a name that resembles ``speedup`` or ``skipdecode``: vLLM would ignore it."""
    for name in filter(looks_like_ours, names):
        raise ScheduleError(f'{name} is no argument of a request: ask with "vllm_xargs": {{"{SPEEDUP}": 2}}')


def looks_like_ours(name: str) -> bool:
    """Tell whether a name resembles ``speedup`` or ``skipdecode``."""
    return re.sub("[^a-z]", "", name.lower()).removesuffix("s") in (SPEEDUP, OWN)


@contextmanager
def bad_request() -> Iterator[None]:
    """Turn a ScheduleError into vLLM's validation error, which is HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ScheduleError as error:
        raise VLLMValidationError(str(error), parameter=SPEEDUP) from None


def assign_speedup(params: Any, serving: Serving, load: Load | None = None) -> None:
    """Write the request's speed-up, and what its keys and values depend on, into its parameters.

    Args:
        params: vLLM's SamplingParams, not shared with other requests.
        serving: the server's settings.
        load: the load policy, if there is one.

    Raises:
        ScheduleError: the server does not offer this speed-up, or an argument has a reserved or similar name.
    """
    speedup, asked = requested_speedup(params, serving)
    given = speedup if load is None or asked else load.choose(speedup)
    schedule = serving.schedules[given]
    layers = schedule.layers(schedule.deepest)
    own = {
        "speedup": given,
        "moved": given != speedup,
        "ends": retirements(schedule, serving.buckets),
        # What keys and values depend on: the prompt's layers, prompt_decay, and the schedule's speed-up.
        "prompt": "" if len(layers) == schedule.num_layers else ",".join(map(str, layers)),
        "own": schedule.prompt_decay,
        "steps": "" if schedule.is_full else f"{given!r}",
    }
    params.extra_args = {**(params.extra_args or {}), SPEEDUP: given, OWN: own}


def speedup_of(params: Any) -> float | None:
    """Return the speed-up that :func:`assign_speedup` set, or None without one (as in vLLM's own trial requests)."""
    return None if (own := _own(params)) is None else float(own["speedup"])


def _own(params: Any) -> dict[str, Any] | None:
    """Return what :func:`assign_speedup` added; None if nothing, or if a client's own argument has that name."""
    own = (getattr(params, "extra_args", None) or {}).get(OWN)
    return own if isinstance(own, dict) else None


def ends_of(request: Any) -> list[float] | None:
    """Return each bucket's end in a request, the first position that runs none of its layers; None: no schedule."""
    own = _own(request.sampling_params)
    return None if own is None else [max(request.num_prompt_tokens + end, 0) for end in own["ends"]]


def block_keys(request: Any, start: int, end: int) -> list[tuple[str, str]]:
    """Return hash keys that distinguish a KV-cache block from one with the same tokens at other depths.

    Args:
        request: the scheduler's request object.
        start: the block's first position.
        end: the position after its last one.
    """
    if (extra := _own(request.sampling_params)) is None:
        return []
    keys = [("skipdecode_prompt", extra["prompt"])] if start == 0 and extra["prompt"] else []
    own_from = request.num_prompt_tokens - extra["own"]
    if end > own_from and (extra["steps"] or extra["own"]):
        # Positions that follow the schedule can be reused only with the same schedule and prompt length.
        keys.append(("skipdecode_steps", f"{extra['steps']}:{request.num_prompt_tokens}"))
    return keys
