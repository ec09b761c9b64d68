"""Patches vLLM. :func:`register` is an entry point of ``vllm.general_plugins``: every process of vLLM calls it.

Each patch calls the original, and does nothing else for a model without schedules:

- the platform's ``check_and_update_config`` chooses our worker or refuses the config;
- ``InputProcessor.process_inputs`` checks a request's speed-up, and may increase it under load;
- ``AsyncLLM.generate`` takes the speed-up from the model's name, and checks it before a response starts, so that a bad
  one is HTTP 400 for streams too;
- ``AsyncLLM.__init__`` follows requests to their end (``frontend.py``);
- ``generate_block_hash_extra_keys`` adds depths to the hashes of prefix-cache blocks;
- ``KVCacheManager.__init__`` installs our block manager if the worker put layers into buckets;
- ``beam_search`` of ``LLM`` and of the server raises: each of its steps is a new request, which follows no schedule.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError, UnsupportedModel
from .patch import patch

if TYPE_CHECKING:
    from .settings import Serving

logger = logging.getLogger("vllm.skipdecode")  # a child of vLLM's logger has its handlers and level


def register() -> None:
    """Patch vLLM, once per process.

    If this release of vLLM cannot be patched, models with schedules are refused and other models run unchanged.
    """
    import vllm
    from vllm.platforms import current_platform

    from .release import is_tested, require_tested
    from .touched import changes

    failures: list[Exception] = []
    try:
        patch(current_platform, "check_and_update_config", partial(_check_config, failures))
    except Exception as error:
        logger.error("skipdecode: vLLM %s cannot be patched, so no model skips layers: %r", vllm.__version__, error)
        return
    try:
        require_tested(vllm.__version__)
        if not is_tested(vllm.__version__) and (found := changes()):
            raise UnsupportedModel(f"what the plugin touches has changed in {vllm.__version__}: {'; '.join(found)}")
        _patch()
    except Exception as error:
        failures.append(error)


def _patch() -> None:
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    patch(InputProcessor, "process_inputs", _process_inputs)
    patch(AsyncLLM, "__init__", _init_async_llm)
    patch(AsyncLLM, "generate", _generate)
    for module in (kv_cache_utils, block_pool):
        patch(module, "generate_block_hash_extra_keys", _block_hash_extra_keys)
    patch(KVCacheManager, "__init__", _init_manager)


def _check_config(failures: list[Exception], original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    original(vllm_config, *args, **kwargs)
    from .configure import choose_worker, serving_of

    if (serving := serving_of(vllm_config)) is None:
        return
    for error in failures:
        raise UnsupportedModel(f"skipdecode does not fit this vLLM: {error}") from error
    choose_worker(vllm_config, serving)
    # An LLM has imported this module; elsewhere nobody needs it, and the import is slow.
    if offline := sys.modules.get("vllm.entrypoints.generate.beam_search.offline"):
        patch(offline.BeamSearchOfflineMixin, "beam_search", _beam_search)


def _process_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from .requests import assign_speedup, bad_request

    serving = _serving(self)
    request = original(self, *args, **kwargs)
    if serving is not None and request.sampling_params is not None:
        with bad_request():
            if request.mm_features:
                raise ScheduleError("only text, here: attention across a picture was not tried with schedules")
            if request.resumable:
                raise ScheduleError("a prompt that goes on growing has no place where a schedule begins")
            # vLLM has copied these parameters for this request, so they can be changed.
            assign_speedup(request.sampling_params, serving, getattr(self, "skipdecode_load", None))
    return request


def _generate(original: Any, self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
    from .requests import bad_request, requested_speedup, take_name

    if (serving := _serving(self.input_processor)) is not None:
        with bad_request():
            take_name(sampling_params)
            requested_speedup(sampling_params, serving)
    return original(self, prompt, sampling_params, *args, **kwargs)


def _init_async_llm(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    from .configure import serving_of

    if (serving := serving_of(vllm_config)) is None:
        return original(self, vllm_config, *args, **kwargs)
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    from .frontend import Frontend

    frontend = Frontend(serving, vllm_config.model_config.served_model_name)
    kwargs["stat_loggers"] = [*(kwargs.get("stat_loggers") or ()), *frontend.stat_loggers()]
    original(self, vllm_config, *args, **kwargs)
    frontend.follow(self)
    patch(BeamSearchOnlineMixin, "beam_search", _beam_search)


def _serving(input_processor: Any) -> Serving | None:
    """Return the settings of the input processor's engine; None if its model runs without schedules."""
    from .configure import serving_of

    if "skipdecode" not in vars(input_processor):
        input_processor.skipdecode = serving_of(input_processor.vllm_config)
    return input_processor.skipdecode


def _beam_search(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from .requests import bad_request

    engine = self.llm_engine if hasattr(self, "llm_engine") else self.engine_client
    if _serving(engine.input_processor) is not None:
        with bad_request():
            raise ScheduleError("beam search runs no schedule in vLLM: use skipdecode generate --num-beams")
    return original(self, *args, **kwargs)


def _block_hash_extra_keys(original: Any, request: Any, start: int, end: int, start_mm_idx: int) -> Any:
    from .requests import block_keys

    keys, index = original(request, start, end, start_mm_idx)
    own = block_keys(request, start, end)
    return ((*(keys or ()), *own) if own else keys), index


def _init_manager(original: Any, self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
    original(self, kv_cache_config, *args, **kwargs)
    if any(hasattr(group.kv_cache_spec, "bucket") for group in kv_cache_config.kv_cache_groups):
        from .kv_blocks import adopt

        adopt(self)
