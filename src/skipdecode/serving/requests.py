"""Speed-ups of requests, on their way from the client to the scheduler and workers in ``extra_args``.

A client names one as the argument ``speedup``, or by the model's name: ``NAME:3x`` is the model NAME at 3x.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ScheduleError
from .load_policy import Load
from .settings import Serving

#: The argument that a client sets: ``vllm_xargs`` of the OpenAI API, ``extra_args`` of SamplingParams.
SPEEDUP = "speedup"
#: The argument that we add when a request enters, so that other processes need no settings.
OWN = "skipdecode"


def apply_model_name(params: Any, name: str | None) -> None:
    """Write the speed-up in a model's name into a request's parameters. Raises ScheduleError if they name another."""
    match = re.fullmatch(r".+:(\d+(?:\.\d+)?)x", name or "")
    if match is None:
        return
    speedup = float(match[1])
    extra = params.extra_args or {}
    if extra.get(SPEEDUP, speedup) != speedup:
        raise ScheduleError(f"the model's name asks for {speedup:g}x and vllm_xargs for {extra[SPEEDUP]}: drop one")
    params.extra_args = extra | {SPEEDUP: speedup}


def requested_speedup(params: Any, serving: Serving) -> float | None:
    """Speed-up that a request names; None if it names none. Raises ScheduleError if the server does not offer it."""
    speedup = (params.extra_args or {}).get(SPEEDUP)
    return None if speedup is None else serving.check_speedup(speedup)


@contextmanager
def bad_request() -> Iterator[None]:
    """Turn a ScheduleError into vLLM's validation error, which is HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ScheduleError as error:
        raise VLLMValidationError(str(error), parameter=SPEEDUP) from None


def refuse_beams(*_: Any, **__: Any) -> None:
    """Refuse beam search: each of its steps is a new request, which follows no schedule."""
    with bad_request():
        raise ScheduleError("beam search runs no schedule in vLLM: use skipdecode generate --num-beams")


def assign_speedup(params: Any, serving: Serving, load: Load | None = None) -> None:
    """Write a request's speed-up, and what its keys and values depend on, into its SamplingParams.

    Raises ScheduleError if the server does not offer the speed-up.
    """
    requested = requested_speedup(params, serving)
    speedup = serving.default if requested is None else requested
    if requested is None and load is not None:
        speedup = load.choose(speedup)
    schedule = serving.schedules[speedup]
    own = {
        "speedup": speedup,
        "moved": requested is None and speedup != serving.default,
        "ends": serving.ends[speedup],
        # What keys and values depend on: the prompt's layers, prompt_decay, and the schedule's speed-up.
        "prompt": str(schedule.layers(schedule.deepest)),
        "prompt_decay": schedule.prompt_decay,
        "steps": None if schedule.is_full else speedup,
    }
    params.extra_args = {**(params.extra_args or {}), SPEEDUP: speedup, OWN: own}


def own_arguments(params: Any) -> dict[str, Any] | None:
    """Arguments that :func:`assign_speedup` added; None: there are none, as in vLLM's own trial requests."""
    own = (getattr(params, "extra_args", None) or {}).get(OWN)
    return own if isinstance(own, dict) else None  # of a server without schedules, a client may set anything


def speedup_of(params: Any) -> float | None:
    """Speed-up that :func:`assign_speedup` stored in vLLM's SamplingParams; None if it stored none."""
    own = own_arguments(params)
    return None if own is None else float(own["speedup"])


def bucket_ends(request: Any) -> list[float] | None:
    """End of each bucket in a request, the first position that runs none of its layers; None: no schedule."""
    own = own_arguments(request.sampling_params)
    return None if own is None else [max(request.num_prompt_tokens + end, 0) for end in own["ends"]]


def block_keys(request: Any, start: int, end: int) -> list[tuple[str, str]]:
    """Hash keys that tell a KV-cache block, positions ``start`` to ``end - 1``, from one at other depths."""
    own = own_arguments(request.sampling_params)
    if own is None:
        return []
    keys = [("skipdecode_prompt", own["prompt"])] if start == 0 else []
    if own["steps"] is not None and end > request.num_prompt_tokens - own["prompt_decay"]:
        # Positions that follow the schedule can be reused only with the same schedule and prompt length.
        keys.append(("skipdecode_steps", f"{own['steps']}:{request.num_prompt_tokens}"))
    return keys
