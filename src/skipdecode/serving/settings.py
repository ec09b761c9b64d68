"""Settings of a server: the speed-ups that requests may name, the schedule of each, and what of vLLM goes with them.

Every process of a server derives the same from the model's config and ``--additional-config '{"skipdecode": {…}}'``.
Imports vLLM only where a GPU's graphs are chosen.
"""

import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ScheduleError, UnsupportedModel
from ..model.adapter import read_sampling, read_schedules
from ..model.config import CONFIG_KEY, bind, config_schedules, num_layers, untrained_warning
from ..schedule import Schedule, choose_schedule
from .steps import DepthTable

#: The release of vLLM that all tests ran with.
TESTED = "0.32.0"
#: vLLM's workers whose model runners can be adapted.
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"

LIMITS = ("load_waiting", "load_token_ms")
OPTIONS = ("speedups", "speedup", "prompt_layers", "schedule", "adapter", "check", "load_speedup", *LIMITS)
#: Speed-ups that a server offers for a model without trained schedules, up to its number of layers.
USUAL = (1.0, 2.0, 3.0, 5.0)
#: Most buckets of layers, since each bucket's block table costs host time in every step.
MOST_BUCKETS = 8
#: Fewer buckets are chosen if they keep at most this share more layers in the KV cache than the best choice.
WORTH = 0.05

#: Layer indices of each bucket; each layer is in exactly one.
Buckets = tuple[tuple[int, ...], ...]

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's logger has its handlers and level


class Serving:
    """Settings of one server.

    Args:
        config: the model's config, as transformers reads it.
        options: each may be missing or None.

            - ``speedups``: list that requests may choose from. Default: the trained speed-ups above 1 (1, 2, 3 and 5
              for a model without any), and the values of ``speedup`` and ``load_speedup``.
            - ``speedup``: of requests that name none. Default: the slowest trained one in the list, else the slowest.
            - ``prompt_layers``: most layers that a prompt runs: a number, or ``"max"``, the depth of the first step.
            - ``schedule``: one for every request, as :meth:`Schedule.to_dict` returns it, instead of these three.
            - ``adapter``: folder of an adapter, whose schedules take the place of the config's.
            - ``check``: whether the engine is compared with its plain model before it serves, as it is on GPUs and on
              releases of vLLM that were not tested.
            - ``load_speedup``, ``load_waiting``, ``load_token_ms``: arguments of the load policy.

    Attributes:
        schedules: by speed-up, slowest first.
        default: speed-up of requests that name none.
        sampling: the adapter's, of requests that skip layers and name no other.
        load: arguments of :class:`~skipdecode.serving.load_policy.Load`, or None without a load policy.
        buckets: groups of layers whose keys and values are freed together; empty if none retires early.
        ends: by speed-up, the end of each bucket, counted from the prompt's end.
        untrained: warning that the model was not trained for its fastest schedule, or None.

    Raises:
        ScheduleError: an option is unknown or contradicts another, the model or the adapter.
    """

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        options = {name: value for name, value in (options or {}).items() if value is not None}
        if unknown := options.keys() - set(OPTIONS):
            raise ScheduleError(
                f"no options of {CONFIG_KEY}: {', '.join(sorted(unknown))}; it has {', '.join(OPTIONS)}"
            )
        self.num_layers = num_layers(config)
        self.adapter = Path(options["adapter"]) if "adapter" in options else None
        self.sampling = {} if self.adapter is None else read_sampling(self.adapter)
        self.check = bool(options.get("check"))
        trained = config_schedules(config) if self.adapter is None else read_schedules(self.adapter)
        if "schedule" in options:
            schedule = Schedule.from_dict(options["schedule"])
            chosen = {float(schedule.target): schedule}
        else:
            offered = self._offered(options, trained)
            chosen = {speedup: choose_schedule(trained, self.num_layers, speedup) for speedup in offered}
        layers = options.get("prompt_layers")
        self.schedules = {}
        for speedup, schedule in chosen.items():
            if layers is not None:  # depths never increase: a prompt runs no fewer layers than the first step
                deepest = schedule.max_depth if layers == "max" else max(int(layers), schedule.max_depth)
                schedule = schedule.replace(prompt_layers=deepest)
            self.schedules[speedup] = bind(schedule, config, None if self.adapter is None else trained)
        slowest = [speedup for speedup in self.schedules if speedup > 1 and speedup in trained]
        self.default = self.check_speedup(options.get("speedup", min(slowest, default=min(self.schedules))))
        self.load = self._load(options)
        self.buckets = choose_buckets(self.schedules.values())
        tables = {speedup: DepthTable(schedule) for speedup, schedule in self.schedules.items()}
        self.ends = {speedup: [*map(table.end, self.buckets)] for speedup, table in tables.items()}
        self.untrained = untrained_warning(self.schedules[max(self.schedules)], trained)

    def check_speedup(self, value: Any, name: str = "speedup") -> float:
        """``value`` as a float. ScheduleError, which names the option: the server does not offer it."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in self.schedules:
            offered = ", ".join(f"{speedup:g}" for speedup in self.schedules)
            raise ScheduleError(f"{name} must be one of {offered}, not {repr(value)[:100]}")
        return float(value)

    def _offered(self, options: Mapping[str, Any], trained: Iterable[float]) -> list[float]:
        if "speedups" in options:
            listed = options["speedups"]
        else:
            # One request at 1x makes every step as deep as the model: it is offered where it is asked for.
            listed = [speedup for speedup in trained if speedup > 1]
            listed = listed or [speedup for speedup in USUAL if speedup <= self.num_layers]
            listed += [options[name] for name in ("speedup", "load_speedup") if name in options]
        return sorted({float(speedup) for speedup in listed})

    def _load(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        limits = {name.removeprefix("load_"): float(options[name]) for name in LIMITS if name in options}
        if ("load_speedup" in options) != bool(limits):
            raise ScheduleError("a load policy needs load_speedup, and load_waiting or load_token_ms: the limit")
        if not limits:
            return None
        speedup = self.check_speedup(options["load_speedup"], "load_speedup")
        if speedup <= self.default:
            raise ScheduleError(f"load_speedup {speedup:g} is not above the default speed-up {self.default:g}")
        return limits | {"speedup": speedup}


def choose_buckets(schedules: Iterable[Schedule]) -> Buckets:
    """Fewest equal buckets of layers that, in the end, keep nearly the fewest layers in the KV cache; () if all stay.

    Buckets follow the ranking of the last, fastest schedule. vLLM's blocks have one size, so unequal buckets would take
    more memory.
    """
    skipping = [schedule for schedule in schedules if not schedule.is_full]
    if not skipping:
        return ()
    ranking = skipping[-1].ranking
    tables = [DepthTable(schedule) for schedule in skipping]
    kept: dict[Buckets, int] = {}
    for count in range(1, MOST_BUCKETS + 1):
        size, rest = divmod(len(ranking), count)
        if not rest:
            buckets = tuple(tuple(sorted(ranking[at : at + size])) for at in range(0, len(ranking), size))
            kept[buckets] = size * sum(table.end(bucket) == math.inf for bucket in buckets for table in tables)
    chosen = next(buckets for buckets, layers in kept.items() if layers <= (1 + WORTH) * min(kept.values()))
    return chosen if len(chosen) > 1 else ()


# --- vLLM's config


def serving_of(vllm_config: Any) -> Serving | None:
    """Settings of an engine with this config; None: the model has no schedules, and no options are given."""
    if vllm_config.model_config is None:
        return None
    config = vllm_config.model_config.hf_config
    additional = vllm_config.additional_config
    options = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    return None if options is None and not getattr(config, CONFIG_KEY, None) else Serving(config, options)


def prepare_config(vllm_config: Any, serving: Serving) -> None:
    """Check a config of vLLM, and choose its CUDA graphs. Raises UnsupportedModel if texts would be others."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    worker = parallel.worker_cls
    has_rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0"
    mode = getattr(vllm_config.compilation_config.mode, "name", "")
    contexts = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    stores = vllm_config.kv_transfer_config, vllm_config.cache_config.kv_offloading_size
    refusals = {
        f"vLLM's worker {worker} is unknown: run on a CPU or a CUDA GPU": worker not in (CPU_WORKER, GPU_WORKER),
        "its Rust frontend reads no speed-ups: unset VLLM_USE_RUST_FRONTEND": has_rust,
        "stock torch.compile would keep the depth of its first step": mode == "STOCK_TORCH_COMPILE",
        "speculative decoding verifies at several depths": vllm_config.speculative_config is not None,
        "pipeline stages would wait for layers that none runs": parallel.pipeline_parallel_size > 1,
        "data parallel ranks with experts run all layers together": parallel.data_parallel_size > 1 and model.is_moe,
        "context parallelism is not supported": max(contexts) > 1,
        "KV connectors and --kv-offloading-size know nothing of depths": stores != (None, None),
        "LoRA maps adapters by token: merge the adapter into the model": vllm_config.lora_config is not None,
        "multimodal positions are not supported": model.uses_mrope,
    }
    for reason, applies in refusals.items():
        if applies:
            raise UnsupportedModel(f"skipdecode in vLLM: {reason}")
    os.environ.setdefault("VLLM_RAISE_ON_LOGIT_NANS", "1")  # else NaN logits become token 0, in silence
    if model.dtype == torch.float32:  # else Triton's attention would multiply with 10 bits' precision
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if serving.untrained:
        logger.warning("skipdecode: %s", serving.untrained)
    if worker == GPU_WORKER:
        _choose_graphs(vllm_config.compilation_config, vllm_config.use_v2_model_runner)


def _choose_graphs(compilation: Any, is_v2: bool) -> None:
    """Leave of vLLM's CUDA graphs those of whole decode steps, which runner V2 keeps by the layers that they run."""
    from vllm.config import CUDAGraphMode

    if is_v2 and compilation.cudagraph_mode.has_full_cudagraphs():
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    else:
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.max_cudagraph_capture_size = 0
        compilation.cudagraph_capture_sizes = []
