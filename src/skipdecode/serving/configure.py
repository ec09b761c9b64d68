"""Where a vLLM config is made: whether the plugin acts, which worker runs, and what it refuses."""

from __future__ import annotations

import os
from typing import Any

from ..core.checkpoint_config import CONFIG_KEY
from ..errors import UnsupportedModel
from .plugin import ALLOW
from .settings import Serving

GPU = "skipdecode.serving.worker_gpu.SkipGPUWorker"
#: vLLM's worker -> ours.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "skipdecode.serving.worker_cpu.SkipCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": GPU,
}

SCHEDULER = "skipdecode.serving.scheduler.SkipScheduler"


def serving_of(vllm_config: Any) -> Serving | None:
    """The settings of an engine of this config; None where the plugin does not act. Raises ScheduleError."""
    if vllm_config.model_config is None:
        return None
    additional = vllm_config.additional_config
    options = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    return Serving.of(vllm_config.model_config.hf_config, options)


def choose_worker(vllm_config: Any) -> None:
    """Our worker in place of vLLM's, where the model has schedules.

    Raises:
        UnsupportedModel: the engine is asked for something that would not be exact, or was never tried.
        ScheduleError: the schedules or options cannot be read.
    """
    serving = serving_of(vllm_config)
    if serving is None:
        return
    for refused, reason in refusals(vllm_config, serving):
        if refused:
            raise UnsupportedModel(f"skipdecode in vLLM: {reason}")
    parallel = vllm_config.parallel_config
    parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    if parallel.worker_cls == GPU:
        _without_graphs(vllm_config.compilation_config)
    scheduler = vllm_config.scheduler_config
    # Where nobody asked for ours, another one is kept, and so is scheduling ahead, for which ours has no class.
    if serving.needs_scheduler or (
        serving.wants_scheduler and scheduler.scheduler_cls is None and not _is_ahead(scheduler)
    ):
        scheduler.scheduler_cls = SCHEDULER


def refusals(vllm_config: Any, serving: Serving) -> list[tuple[bool, str]]:
    """What is refused, and why."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    worker = WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    mode = getattr(vllm_config.compilation_config.mode, "name", "")
    return [
        (model.runner_type != "generate", "only models that generate have schedules"),
        (worker not in WORKERS.values(), f"there is no adapter for the worker {worker}"),
        (
            worker == GPU and not os.environ.get(ALLOW),
            f"GPUs were never tried: {ALLOW}=1 lets you (without CUDA graphs); compare the texts yourself",
        ),
        (mode == "STOCK_TORCH_COMPILE", "stock torch.compile would compile the depth of its first step for good"),
        (vllm_config.speculative_config is not None, "speculation verifies at several depths: turn one of them off"),
        (parallel.pipeline_parallel_size > 1, "stages would wait for layers that none runs: no pipeline parallelism"),
        (parallel.data_parallel_size > 1, "data parallel ranks were not tried: start servers side by side"),
        (
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
            "context parallelism is not supported",
        ),
        (parallel.enable_dbo, "dual batch overlap is not supported"),
        (vllm_config.kv_transfer_config is not None, "KV connectors know nothing of depths"),
        (vllm_config.lora_config is not None, "LoRA maps adapters by token: merge the adapter into the model"),
        (model.is_encoder_decoder, "encoder-decoder models have no schedules"),
        (model.uses_mrope, "multimodal positions are not supported"),
        (
            serving.needs_scheduler and vllm_config.scheduler_config.scheduler_cls not in (None, SCHEDULER),
            "admit_together and max_slowdown bring a scheduler of their own: leave --scheduler-cls out",
        ),
        (
            serving.needs_scheduler and _is_ahead(vllm_config.scheduler_config),
            "admit_together and max_slowdown were not tried with steps scheduled ahead: --no-async-scheduling",
        ),
        (vllm_config.cache_config.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill is not supported"),
        (serving.int8_head and worker == GPU, "int8_head is for CPUs"),
        (serving.int8_head and parallel.tensor_parallel_size > 1, "int8_head was not tried with tensor parallelism"),
        (
            serving.int8_head and model.head_dtype != model.dtype,
            "head_dtype asks for a head of floats, int8_head for one of 8 bits: leave one of them out",
        ),
    ]


def _without_graphs(compilation: Any) -> None:
    """A CUDA graph holds the layers that ran when it was captured."""
    from vllm.config import CUDAGraphMode

    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.max_cudagraph_capture_size, compilation.cudagraph_capture_sizes = 0, []


def _is_ahead(scheduler_config: Any) -> bool:
    return bool(scheduler_config.async_scheduling)
