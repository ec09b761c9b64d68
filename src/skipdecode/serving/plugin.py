"""vLLM's entry point ``vllm.general_plugins``: called in every process that vLLM starts, before it reads a config.

Places of vLLM are stood in for, each by a function that calls what it found there:

- the platform's ``check_and_update_config``, where a config is complete: our worker, or a refusal;
- ``InputProcessor.process_inputs``, where a request enters: its speed-up, checked, or made faster under load;
- ``generate_block_hash_extra_keys``, what tells blocks of the prefix cache apart: depths do;
- of servers, ``AsyncLLM.__init__``: requests are followed to their end (``frontend.py``); and ``AsyncLLM.generate``,
  called before a response begins: a bad speed-up is HTTP 400 for streams too.
- ``KVCacheManager.__init__``, where the scheduler keeps its blocks: ours, if the worker put layers into buckets.

They do nothing for a model without schedules.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError, UnsupportedModel

if TYPE_CHECKING:
    from .settings import Serving

logger = logging.getLogger("vllm.skipdecode")  # vLLM's handlers and level hold below its own name


def register() -> None:
    """Stand in for these places, once per process.

    A release that has other places leaves models without schedules alone; those with schedules are refused.
    """
    import vllm
    from vllm.platforms import current_platform

    from .release import is_tested

    platform: Any = type(current_platform)
    try:
        if getattr(platform.check_and_update_config, "skipdecode", False):
            return
        failures: list[Exception] = []
        platform.check_and_update_config = classmethod(_checked(platform.check_and_update_config.__func__, failures))
    except Exception as error:
        logger.error("skipdecode: vLLM %s has no place for it; no model skips layers: %r", vllm.__version__, error)
        return
    # In a release that was not tested the check refuses models with schedules, and all else stays as it is.
    if is_tested(vllm.__version__):
        try:
            _stand_in()
        except Exception as error:
            failures.append(error)


def _stand_in() -> None:
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    InputProcessor.process_inputs = _settled(InputProcessor.process_inputs)
    AsyncLLM.__init__ = _followed(AsyncLLM.__init__)
    AsyncLLM.generate = _refusing(AsyncLLM.generate)
    keys = _with_depths(kv_cache_utils.generate_block_hash_extra_keys)
    kv_cache_utils.generate_block_hash_extra_keys = block_pool.generate_block_hash_extra_keys = keys
    KVCacheManager.__init__ = _in_buckets(KVCacheManager.__init__)


def _checked(found: Any, failures: list[Exception]) -> Any:
    @functools.wraps(found)
    def check_and_update_config(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        found(cls, vllm_config, *args, **kwargs)
        import vllm

        from .configure import choose_worker, serving_of
        from .release import require_tested

        if serving_of(vllm_config) is not None:
            require_tested(vllm.__version__)
            if failures:
                raise UnsupportedModel(f"skipdecode does not fit vLLM {vllm.__version__}: {failures[0]!r}")
            choose_worker(vllm_config)
            _refuse_beams()

    check_and_update_config.skipdecode = True  # type: ignore[attr-defined]
    return check_and_update_config


def _settled(found: Any) -> Any:
    @functools.wraps(found)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .requests import settle

        serving = _serving(self)
        request = found(self, *args, **kwargs)
        if serving is not None and request.sampling_params is not None:
            with _bad_request():
                if request.mm_features:
                    raise ScheduleError("only text, here: attention across a picture was not tried with schedules")
                if request.resumable:
                    raise ScheduleError("a prompt that goes on growing has no place where a schedule begins")
                # The request's own copy.
                settle(request.sampling_params, serving, getattr(self, "skipdecode_load", None))
        return request

    return process_inputs


def _refusing(found: Any) -> Any:
    @functools.wraps(found)
    def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        from .requests import wanted

        if (serving := _serving(self.input_processor)) is not None:
            with _bad_request():
                wanted(sampling_params, serving)
        return found(self, prompt, sampling_params, *args, **kwargs)

    return generate


def _followed(found: Any) -> Any:
    @functools.wraps(found)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from .configure import serving_of

        if (serving := serving_of(vllm_config)) is None:
            return found(self, vllm_config, *args, **kwargs)
        from .frontend import Frontend

        frontend = Frontend(serving, vllm_config.model_config.served_model_name)
        kwargs["stat_loggers"] = [*(kwargs.get("stat_loggers") or ()), *frontend.stat_loggers()]
        found(self, vllm_config, *args, **kwargs)
        frontend.follow(self)

    return __init__


def _serving(input_processor: Any) -> Serving | None:
    """The settings of the engine that an input processor belongs to."""
    from .configure import serving_of

    if "skipdecode" not in vars(input_processor):
        input_processor.skipdecode = serving_of(input_processor.vllm_config)
    return input_processor.skipdecode


@contextmanager
def _bad_request() -> Iterator[None]:
    """What a request cannot have is HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ScheduleError as error:
        raise VLLMValidationError(str(error), parameter="speedup") from None


def _refuse_beams() -> None:
    """vLLM makes every step of a beam a new request, whose whole text is a prompt: offline, it would run no schedule.

    Importing that module where plugins are loaded would import half of vLLM in every process; whoever has an ``LLM``
    has imported it.
    """
    if (offline := sys.modules.get("vllm.entrypoints.generate.beam_search.offline")) is None:
        return
    mixin, found = offline.BeamSearchOfflineMixin, offline.BeamSearchOfflineMixin.beam_search
    if getattr(found, "skipdecode", False):
        return

    @functools.wraps(found)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _serving(self.llm_engine.input_processor) is not None:
            raise ScheduleError("beam search runs no schedule in vLLM: use skipdecode generate --num-beams")
        return found(self, *args, **kwargs)

    beam_search.skipdecode = True  # type: ignore[attr-defined]
    mixin.beam_search = beam_search


def _with_depths(found: Any) -> Any:
    @functools.wraps(found)
    def generate_block_hash_extra_keys(request: Any, start: int, end: int, start_mm_idx: int) -> Any:
        from .requests import block_keys

        keys, index = found(request, start, end, start_mm_idx)
        own = block_keys(request, start, end)
        return ((*(keys or ()), *own) if own else keys), index

    return generate_block_hash_extra_keys


def _in_buckets(found: Any) -> Any:
    @functools.wraps(found)
    def __init__(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        found(self, kv_cache_config, *args, **kwargs)
        if any(hasattr(group.kv_cache_spec, "bucket") for group in kv_cache_config.kv_cache_groups):
            from .blocks import adopt

            adopt(self)

    return __init__
