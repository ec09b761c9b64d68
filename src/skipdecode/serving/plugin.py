"""Patches vLLM. :func:`register` is an entry point of ``vllm.general_plugins``: every process of vLLM calls it.

Each patch calls the original, and does nothing else for a model without schedules:

- the platform's ``check_and_update_config`` chooses our worker or refuses the config;
- ``InputProcessor.process_inputs`` checks a request's speed-up, and may increase it under load;
- ``AsyncLLM.generate`` checks the speed-up before a response starts, so that a bad one is HTTP 400 for streams too;
- ``AsyncLLM.__init__`` follows requests to their end (``frontend.py``);
- ``generate_block_hash_extra_keys`` adds depths to the hashes of prefix-cache blocks;
- ``KVCacheManager.__init__`` installs our block manager if the worker put layers into buckets.
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

logger = logging.getLogger("vllm.skipdecode")  # a child of vLLM's logger has its handlers and level


def register() -> None:
    """Patch vLLM, once per process.

    If this release of vLLM cannot be patched, models with schedules are refused and other models run unchanged.
    """
    import vllm
    from vllm.platforms import current_platform

    from .release import is_tested

    platform: Any = type(current_platform)
    try:
        if getattr(platform.check_and_update_config, "skipdecode", False):
            return
        failures: list[Exception] = []
        original = platform.check_and_update_config.__func__
        platform.check_and_update_config = classmethod(_patched_check(original, failures))
    except Exception as error:
        logger.error("skipdecode: vLLM %s cannot be patched, so no model skips layers: %r", vllm.__version__, error)
        return
    # In an untested release, only the check is patched: it refuses models with schedules.
    if is_tested(vllm.__version__):
        try:
            _patch()
        except Exception as error:
            failures.append(error)


def _patch() -> None:
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    InputProcessor.process_inputs = _patched_process_inputs(InputProcessor.process_inputs)
    AsyncLLM.__init__ = _patched_init(AsyncLLM.__init__)
    AsyncLLM.generate = _patched_generate(AsyncLLM.generate)
    keys = _patched_block_keys(kv_cache_utils.generate_block_hash_extra_keys)
    kv_cache_utils.generate_block_hash_extra_keys = block_pool.generate_block_hash_extra_keys = keys
    KVCacheManager.__init__ = _patched_manager_init(KVCacheManager.__init__)


def _patched_check(original: Any, failures: list[Exception]) -> Any:
    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(cls, vllm_config, *args, **kwargs)
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


def _patched_process_inputs(original: Any) -> Any:
    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .requests import assign_speedup

        serving = _serving(self)
        request = original(self, *args, **kwargs)
        if serving is not None and request.sampling_params is not None:
            with _bad_request():
                if request.mm_features:
                    raise ScheduleError("only text, here: attention across a picture was not tried with schedules")
                if request.resumable:
                    raise ScheduleError("a prompt that goes on growing has no place where a schedule begins")
                # vLLM has copied these parameters for this request, so they can be changed.
                assign_speedup(request.sampling_params, serving, getattr(self, "skipdecode_load", None))
        return request

    return process_inputs


def _patched_generate(original: Any) -> Any:
    @functools.wraps(original)
    def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        from .requests import requested_speedup

        if (serving := _serving(self.input_processor)) is not None:
            with _bad_request():
                requested_speedup(sampling_params, serving)
        return original(self, prompt, sampling_params, *args, **kwargs)

    return generate


def _patched_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from .configure import serving_of

        if (serving := serving_of(vllm_config)) is None:
            return original(self, vllm_config, *args, **kwargs)
        from .frontend import Frontend

        frontend = Frontend(serving, vllm_config.model_config.served_model_name)
        kwargs["stat_loggers"] = [*(kwargs.get("stat_loggers") or ()), *frontend.stat_loggers()]
        original(self, vllm_config, *args, **kwargs)
        frontend.follow(self)

    return __init__


def _serving(input_processor: Any) -> Serving | None:
    """Return the settings of the input processor's engine."""
    from .configure import serving_of

    if "skipdecode" not in vars(input_processor):
        input_processor.skipdecode = serving_of(input_processor.vllm_config)
    return input_processor.skipdecode


@contextmanager
def _bad_request() -> Iterator[None]:
    """Turn a ScheduleError into vLLM's validation error, which is HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ScheduleError as error:
        raise VLLMValidationError(str(error), parameter="speedup") from None


def _refuse_beams() -> None:
    """Make ``LLM.beam_search`` raise: vLLM runs each beam step as a new request, which would follow no schedule.

    Patch its module only if it is imported, as it is wherever an ``LLM`` exists: the import is slow in every process.
    """
    if (offline := sys.modules.get("vllm.entrypoints.generate.beam_search.offline")) is None:
        return
    mixin, original = offline.BeamSearchOfflineMixin, offline.BeamSearchOfflineMixin.beam_search
    if getattr(original, "skipdecode", False):
        return

    @functools.wraps(original)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _serving(self.llm_engine.input_processor) is not None:
            raise ScheduleError("beam search runs no schedule in vLLM: use skipdecode generate --num-beams")
        return original(self, *args, **kwargs)

    beam_search.skipdecode = True  # type: ignore[attr-defined]
    mixin.beam_search = beam_search


def _patched_block_keys(original: Any) -> Any:
    @functools.wraps(original)
    def generate_block_hash_extra_keys(request: Any, start: int, end: int, start_mm_idx: int) -> Any:
        from .requests import block_keys

        keys, index = original(request, start, end, start_mm_idx)
        own = block_keys(request, start, end)
        return ((*(keys or ()), *own) if own else keys), index

    return generate_block_hash_extra_keys


def _patched_manager_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, kv_cache_config, *args, **kwargs)
        if any(hasattr(group.kv_cache_spec, "bucket") for group in kv_cache_config.kv_cache_groups):
            from .blocks import adopt

            adopt(self)

    return __init__
