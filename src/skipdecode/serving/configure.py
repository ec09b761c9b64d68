"""Reads a vLLM config: decides whether the plugin acts, chooses the worker and refuses unsupported options."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..errors import UnsupportedModel
from ..model.config import CONFIG_KEY
from .release import ALLOW_GPU
from .requests import looks_like_ours
from .settings import Serving

GPU = "skipdecode.serving.gpu_worker.SkipGPUWorker"
#: vLLM's worker class -> ours.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "skipdecode.serving.cpu_worker.SkipCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": GPU,
}

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's logger has its handlers and level


def serving_of(vllm_config: Any) -> Serving | None:
    """Return the settings of an engine with this config, or None if the plugin does not act.

    It acts if the model has schedules or options are given. Raises ScheduleError for options that cannot be read,
    UnsupportedModel for some under a name that only resembles ours.
    """
    if vllm_config.model_config is None:
        return None
    config, additional = vllm_config.model_config.hf_config, vllm_config.additional_config
    additional = additional if isinstance(additional, dict) else {}
    for name in additional.keys() - {CONFIG_KEY}:
        if looks_like_ours(str(name)):
            raise UnsupportedModel(f"--additional-config has {name}, which nobody reads: its name is {CONFIG_KEY}")
    options = additional.get(CONFIG_KEY)
    return None if options is None and not getattr(config, CONFIG_KEY, None) else Serving(config, options)


def choose_worker(vllm_config: Any, serving: Serving) -> None:
    """Replace vLLM's worker class by ours. Raises UnsupportedModel as :func:`refuse` does."""
    refuse(vllm_config, serving)
    parallel = vllm_config.parallel_config
    if parallel.worker_cls in WORKERS:  # warn once: vLLM checks the config again when it copies it
        _warn(vllm_config.model_config, serving)
    parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    if parallel.worker_cls == GPU:
        _choose_graphs(vllm_config.compilation_config, vllm_config.use_v2_model_runner)


def refuse(vllm_config: Any, serving: Serving) -> None:
    """Raise UnsupportedModel for an option that would not be exact with schedules, or was never tested."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    worker = WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    mode = getattr(vllm_config.compilation_config.mode, "name", "")
    refusals = [
        (model.runner_type != "generate", "only models that generate have schedules"),
        (worker not in WORKERS.values(), f"there is no adapter for the worker {worker}"),
        (
            worker == GPU and not os.environ.get(ALLOW_GPU),
            f"GPUs were tried once, and in part (docs/serving.md): {ALLOW_GPU}=1 lets you; compare the texts yourself",
        ),
        (
            os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
            "vLLM's Rust frontend reads no speed-ups: unset VLLM_USE_RUST_FRONTEND",
        ),
        (
            os.environ.get("VLLM_SKIP_MODEL_NAME_VALIDATION", "0") not in ("", "0"),
            "without checks of names every name would get the default speed: unset VLLM_SKIP_MODEL_NAME_VALIDATION",
        ),
        (mode == "STOCK_TORCH_COMPILE", "stock torch.compile would compile the depth of its first step for good"),
        (vllm_config.speculative_config is not None, "speculation verifies at several depths: turn one of them off"),
        (parallel.pipeline_parallel_size > 1, "stages would wait for layers that none runs: no pipeline parallelism"),
        (
            parallel.data_parallel_size > 1 and model.is_moe,
            "data parallel ranks of a model with experts run every step together: start servers side by side",
        ),
        (
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
            "context parallelism is not supported",
        ),
        (parallel.enable_dbo, "dual batch overlap is not supported"),
        (
            vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None,
            "KV connectors and --kv-offloading-size know nothing of depths",
        ),
        (vllm_config.lora_config is not None, "LoRA maps adapters by token: merge the adapter into the model"),
        (model.is_encoder_decoder, "encoder-decoder models have no schedules"),
        (model.uses_mrope, "multimodal positions are not supported"),
        (
            vllm_config.aux_output_config.enable_return_routed_experts,
            "--enable-return-routed-experts expects experts of every layer for every token",
        ),
        (
            serving.adapter is not None and vllm_config.weight_transfer_config is not None,
            "weights that change while the server runs are no longer those that the adapter was trained on",
        ),
        (cache.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill is not supported"),
    ]
    for is_asked, reason in refusals:
        if is_asked:
            raise UnsupportedModel(f"skipdecode in vLLM: {reason}")


def _warn(model: Any, serving: Serving) -> None:
    """Warn if the checkpoint is float32 but runs in less, or was not trained for the fastest schedule."""
    stored, runs = getattr(model.hf_config.get_text_config(decoder=True), "dtype", None), model.dtype
    if "float32" in str(stored) and "float32" not in str(runs):
        logger.warning(
            "skipdecode: the checkpoint is float32 and runs in %s, so texts may differ from skipdecode generate's: "
            "--dtype float32 keeps it",
            str(runs).removeprefix("torch."),
        )
    if serving.untrained:
        logger.warning("skipdecode: %s", serving.untrained)


def _choose_graphs(compilation: Any, is_v2: bool) -> None:
    """Leave of vLLM's CUDA graphs those of whole decode steps, which runner V2 keeps by the layers that they run.

    Others replay the layers of their capture: runner V1's, and those of pieces of a step.
    """
    from vllm.config import CUDAGraphMode

    if is_v2 and compilation.cudagraph_mode.has_full_cudagraphs():
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    else:
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.max_cudagraph_capture_size, compilation.cudagraph_capture_sizes = 0, []
