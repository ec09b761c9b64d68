"""Patches of vLLM. :func:`register` is an entry point of ``vllm.general_plugins``: every process of vLLM calls it.

Each patch calls the original, and does nothing else for a model without schedules.
"""

from functools import partial
from typing import Any

from ..errors import ScheduleError, UnsupportedModel
from .patch import patch
from .requests import assign_speedup, bad_request, block_keys
from .self_check import check_engine, check_server, is_needed
from .settings import TESTED, prepare_config, serving_of


def register() -> None:
    """Patch vLLM, once per process. A release that cannot be patched refuses models with schedules only."""
    from vllm.platforms import current_platform

    missing: Exception | None = None
    try:
        _patch_engine()
    except (ImportError, AttributeError) as error:  # another release
        missing = error
    patch(current_platform, "check_and_update_config", partial(_check_config, missing=missing))


def _patch_engine() -> None:
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    patch(WorkerWrapperBase, "init_device", _init_device)
    patch(InputProcessor, "process_inputs", _process_inputs)
    patch(AsyncLLM, "__init__", _init_async_llm)
    patch(LLMEngine, "__init__", _init_llm_engine)
    for module in (kv_cache_utils, block_pool):
        patch(module, "generate_block_hash_extra_keys", _block_hash_extra_keys)
    patch(KVCacheManager, "__init__", _init_manager)


def _check_config(original: Any, vllm_config: Any, *args: Any, missing: Exception | None = None, **kwargs: Any) -> None:
    """Refuse options that are not exact, and choose CUDA graphs."""
    import vllm

    original(vllm_config, *args, **kwargs)
    serving = serving_of(vllm_config)
    if serving is not None:
        if missing is not None:
            raise UnsupportedModel(f"skipdecode: vLLM {vllm.__version__} is not {TESTED}, and lacks a part: {missing}")
        prepare_config(vllm_config, serving)


def _init_device(original: Any, wrapper: Any) -> None:
    """Adapt the model runner."""
    original(wrapper)
    serving = serving_of(wrapper.vllm_config)
    if serving is not None:
        from .runner import adapt

        adapt(wrapper.worker, serving)


def _process_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check a request's speed-up, and increase it under load."""
    if "skipdecode" not in vars(self):
        self.skipdecode = serving_of(self.vllm_config)
    serving = self.skipdecode
    request = original(self, *args, **kwargs)
    if serving is not None and request.sampling_params is not None:
        with bad_request():
            if request.mm_features:
                raise ScheduleError("only text: attention across a picture was not tried with schedules")
            if request.resumable:
                raise ScheduleError("a prompt that grows has no place where a schedule begins")
            # vLLM has copied these parameters for this request, so they can be changed.
            assign_speedup(request.sampling_params, serving, getattr(self, "skipdecode_load", None))
    return request


def _init_async_llm(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Follow requests to their end, and read speed-ups in models' names."""
    serving = serving_of(vllm_config)
    if serving is None:
        return original(self, vllm_config, *args, **kwargs)
    from .metrics import RequestMetrics, token_times

    metrics = RequestMetrics(serving, vllm_config.model_config.served_model_name)
    if metrics.load is not None:
        kwargs["stat_loggers"] = [*(kwargs.get("stat_loggers") or ()), token_times(metrics.load)]
    original(self, vllm_config, *args, **kwargs)
    metrics.follow(self)
    if is_needed(vllm_config, serving):
        try:
            from vllm.entrypoints.launchers.api_server import entry
        except ImportError as error:  # another release
            raise UnsupportedModel(f"skipdecode: this vLLM's server cannot be checked: {error}") from error

        patch(entry, "init_app_state", check_server)


def _init_llm_engine(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Check an engine without a server."""
    original(self, vllm_config, *args, **kwargs)
    serving = serving_of(vllm_config)
    if serving is not None and is_needed(vllm_config, serving):
        check_engine(self, serving)


def _block_hash_extra_keys(original: Any, request: Any, start: int, end: int, start_mm_idx: int) -> Any:
    """Add depths to the hashes of prefix-cache blocks."""
    keys, index = original(request, start, end, start_mm_idx)
    own = block_keys(request, start, end)
    return ((*(keys or ()), *own) if own else keys), index


def _init_manager(original: Any, self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
    """Install our block manager if the worker put layers into buckets."""
    original(self, kv_cache_config, *args, **kwargs)
    if any(hasattr(group.kv_cache_spec, "bucket") for group in kv_cache_config.kv_cache_groups):
        from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

        from .kv_blocks import BucketCoordinator, BucketKVCacheManager

        self.__class__ = BucketKVCacheManager
        if isinstance(self.coordinator, HybridKVCacheCoordinator):
            self.coordinator.__class__ = BucketCoordinator
