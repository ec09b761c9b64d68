"""vLLM's entry point ``vllm.general_plugins``: called in every process that vLLM starts, before it reads a config.

Four places of vLLM are stood in for, each by a function that calls what it found there:

- the platform's ``check_and_update_config``, where a config is complete: our worker, or a refusal;
- ``InputProcessor.process_inputs``, where a request enters: its speed-up, checked;
- ``generate_block_hash_extra_keys``, what tells blocks of the prefix cache apart: depths do;
- ``KVCacheManager.__init__``, where the scheduler keeps its blocks: ours, if the worker put layers into buckets.

They do nothing for a model without schedules.
"""

from __future__ import annotations

import functools
import os
from typing import Any

#: The releases of vLLM that all tests ran with.
TESTED = ("0.32.0",)
ALLOW = "SKIPDECODE_ALLOW_UNTESTED_VLLM"


def register() -> None:
    """Stand in for the four places, once per process."""
    from vllm.platforms import current_platform
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.input_processor import InputProcessor

    platform: Any = type(current_platform)
    if getattr(platform.check_and_update_config, "skipdecode", False):
        return
    platform.check_and_update_config = classmethod(_checked(platform.check_and_update_config.__func__))
    InputProcessor.process_inputs = _settled(InputProcessor.process_inputs)
    keys = _with_depths(kv_cache_utils.generate_block_hash_extra_keys)
    kv_cache_utils.generate_block_hash_extra_keys = block_pool.generate_block_hash_extra_keys = keys
    KVCacheManager.__init__ = _in_buckets(KVCacheManager.__init__)  # type: ignore[method-assign]


def require_tested(version: str) -> None:
    """Raises UnsupportedModel for a release of vLLM that was not tested, unless the environment allows it."""
    from ..errors import UnsupportedModel

    release = version.split("+")[0]
    if release not in TESTED and not os.environ.get(ALLOW):
        raise UnsupportedModel(
            f"skipdecode was tested with vLLM {', '.join(TESTED)}, not with {version}: install that one, or set "
            f"{ALLOW}=1 and compare the texts yourself"
        )


def _checked(found: Any) -> Any:
    @functools.wraps(found)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        found(cls, vllm_config)
        import vllm

        from .configure import choose_worker, serving_of

        if serving_of(vllm_config) is not None:
            require_tested(vllm.__version__)
            choose_worker(vllm_config)

    check_and_update_config.skipdecode = True  # type: ignore[attr-defined]
    return check_and_update_config


def _settled(found: Any) -> Any:
    @functools.wraps(found)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.exceptions import VLLMValidationError

        from ..errors import ScheduleError
        from .configure import serving_of
        from .requests import settle

        if "skipdecode" not in vars(self):
            self.skipdecode = serving_of(self.vllm_config)
        request = found(self, *args, **kwargs)
        if self.skipdecode is not None and request.sampling_params is not None:
            try:
                settle(request.sampling_params, self.skipdecode)  # the request's own copy
            except ScheduleError as error:
                raise VLLMValidationError(str(error), parameter="speedup") from None
        return request

    return process_inputs


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
