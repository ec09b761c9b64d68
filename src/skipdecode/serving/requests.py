"""A request's speed-up on its way from the client to the layers, in the extra arguments of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..core.schedule import Schedule
from ..errors import ScheduleError
from .buckets import retirements
from .policy import Load
from .settings import Serving

#: What a client sets (``vllm_xargs`` of the OpenAI API, ``extra_args`` of SamplingParams).
SPEEDUP = "speedup"
#: What we add where a request enters, for the processes that know neither config nor options.
OWN = "skipdecode"
#: Arguments of connectors that move keys and values, which are refused here.
CONNECTORS = ("kv_transfer_params", "ec_transfer_params")


def requested_speedup(params: Any, serving: Serving) -> tuple[float, bool]:
    """The speed-up that a request gets where no load changes it, and whether the request itself named it.

    Raises:
        ScheduleError: a speed-up that the server does not offer, or arguments that are ours.
    """
    extra = params.extra_args or {}
    refuse_look_alikes(name for name in extra if name != SPEEDUP)
    for name in CONNECTORS:  # vLLM itself would fail over it in the engine
        if not isinstance(extra.get(name), dict | None):
            raise ScheduleError(f"{name} must be an object, not {repr(extra[name])[:100]}")
    asked = extra.get(SPEEDUP)
    return (serving.default if asked is None else serving.speedup(asked)), asked is not None


def refuse_look_alikes(names: Iterable[str]) -> None:
    """Raises ScheduleError for a name that its client must have meant for ours: full depth would be no answer."""
    for name in names:
        if re.sub("[^a-z]", "", name.lower()).removesuffix("s") in (SPEEDUP, OWN):
            raise ScheduleError(f'{name} is no argument of a request: ask with "vllm_xargs": {{"{SPEEDUP}": 2}}')


def assign_speedup(params: Any, serving: Serving, load: Load | None = None) -> None:
    """Write the request's speed-up, and what its keys and values depend on, into its parameters.

    Args:
        params: vLLM's, this request's alone.
        serving: what the server offers.
        load: makes new requests faster while limits are passed.

    Raises:
        ScheduleError: a speed-up that the server does not offer, or arguments that are ours.
    """
    speedup, asked = requested_speedup(params, serving)
    given = speedup if load is None else load.choose(speedup, asked)
    schedule = serving.schedules[given]
    own = identity(schedule, given) | {"ends": retirements(schedule, serving.buckets), "moved": given != speedup}
    params.extra_args = {**(params.extra_args or {}), SPEEDUP: given, OWN: own}


def identity(schedule: Schedule, speedup: float) -> dict[str, Any]:
    """What keys and values depend on: the layers of prompts, how many of a prompt's last positions have a depth of
    their own, and the schedule."""
    layers = schedule.layers(schedule.deepest)
    prompt = "" if len(layers) == schedule.num_layers else ",".join(map(str, layers))
    return {
        "speedup": speedup,
        "prompt": prompt,
        "own": schedule.prompt_decay,
        "steps": "" if schedule.is_full else f"{speedup!r}",
    }


def speedup_of(params: Any) -> float | None:
    """The speed-up of a request that :func:`assign_speedup` saw; None for any other (vLLM's own trial requests)."""
    return None if (own := _own(params)) is None else float(own["speedup"])


def _own(params: Any) -> dict[str, Any] | None:
    """What :func:`assign_speedup` put there. Clients of a stock server may use our name too, but not for a mapping."""
    own = (getattr(params, "extra_args", None) or {}).get(OWN)
    return own if isinstance(own, dict) else None


def ends_of(request: Any) -> list[float] | None:
    """For each bucket of layers the first position that runs none of them, all that follow included; None where that
    is not known: all layers are kept then.

    Args:
        request: vLLM's, in the scheduler.
    """
    own = _own(request.sampling_params)
    return None if own is None else [max(request.num_prompt_tokens + end, 0) for end in own["ends"]]


def block_keys(request: Any, start: int, end: int) -> list[tuple[str, str]]:
    """What tells a block of keys and values apart from one of the same tokens at other depths.

    Args:
        request: vLLM's, in the scheduler.
        start: the block's first position.
        end: the position after its last.
    """
    if (extra := _own(request.sampling_params)) is None:
        return []
    keys = [("skipdecode_prompt", extra["prompt"])] if start == 0 and extra["prompt"] else []
    own_from = request.num_prompt_tokens - extra["own"]
    if end > own_from and (extra["steps"] or extra["own"]):
        # Positions with a depth of their own: of use to requests of the same schedule and the same prompt alone.
        keys.append(("skipdecode_steps", f"{extra['steps']}:{request.num_prompt_tokens}"))
    return keys
