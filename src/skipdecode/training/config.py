"""Configurations of ``skipdecode train`` and ``skipdecode distill``; a YAML file may hold the same keys."""

import difflib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import yaml
from transformers import TrainingArguments

from ..errors import FileError, UsageError
from ..files import read_json, write
from ..loading.device import gpu_has_bfloat16
from ..schedule import ORDERS
from .callback import Skipping

#: File of a run's folder with its options.
RECORD = "training.json"
#: Options that may differ between a killed run and the one that resumes it.
FREE = "output engine eval_prompts max_steps num_train_epochs eval_steps save_steps logging_steps report_to".split()
#: Options that self-generated texts depend on.
TEXT_OPTIONS = "fingerprint prompts task num_texts max_new_tokens temperature engine bf16 seed".split()
#: Defaults of TrainingArguments' fields.
DEFAULTS: dict[str, Any] = {
    "label_names": ["labels"],
    "logging_nan_inf_filter": False,  # log a NaN loss as it is: the trainer raises on it
    "prediction_loss_only": True,
    "remove_unused_columns": False,
    "include_num_input_tokens_seen": "non_padding",
    "logging_steps": 10,
    "report_to": "none",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "weight_decay": 0.01,
    "eval_steps": 500,
    "save_total_limit": 2,
    "seed": 0,
}
#: Least and most of options that are numbers: whole ones if the least is. A text's first token teaches nothing.
LIMITS = {
    "learning_rate weight_decay warmup_steps num_train_epochs logging_steps eval_steps save_steps": (0.0, inf),
    "max_eval_samples bottom_layers prompt_decay": (0, inf),
    "per_device_train_batch_size gradient_accumulation_steps num_texts rank horizon": (1, inf),
    "max_new_tokens": (2, inf),
    "max_steps": (-1, inf),
    "temperature": (0.01, inf),
    "distill_weight": (0.0, 1),
    "seed": (0, 2**32 - 1),
}
#: Options that are fields of new schedules, beside ``bottom_layers``.
STYLE = "order decay horizon prompt_decay prompt_layers".split()
Config = TypeVar("Config", bound="RunConfig")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that ``train`` and ``distill`` share, which their help explains, and three for files and Python.

    Args:
        max_eval_samples: examples that are held out for evaluation, at most.
        attn_implementation: ``sdpa`` gave NaN losses on GPUs; None: transformers' choice.
        trainer: fields of transformers' TrainingArguments.
    """

    defaults: ClassVar[dict[str, Any]]

    model: str
    output: str
    task: str = "jsonl"
    speedups: tuple[float, ...] | None = None
    speedup_weights: tuple[float, ...] | None = None
    order: str | tuple[int, ...] | None = None
    bottom_layers: int | None = None
    max_eval_samples: int = 100
    attn_implementation: str | None = "eager"
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("speedups", float), ("speedup_weights", float), ("order", int)):
            value = getattr(self, name)
            if value is not None and value not in ORDERS:
                object.__setattr__(self, name, _numbers(name, value, kind))
        if self.speedups or self.speedup_weights:
            Skipping(speedups=self.speedups or (), weights=self.speedup_weights)  # which refuses what it cannot draw
        for names, (least, most) in LIMITS.items():
            for name in names.split():
                value = {**vars(self), **self.trainer}.get(name)
                if value is not None and not (isinstance(value, (int, type(least))) and least <= value <= most):
                    whole = "whole " * isinstance(least, int)
                    raise UsageError(f"{name} must be a {whole}number of {least} to {most}, not {value!r}")

    @property
    def style(self) -> dict[str, Any]:
        """Fields of new schedules that the user set."""
        values = {"warmup": self.bottom_layers} | {name: getattr(self, name, None) for name in STYLE}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def create(cls: type[Config], file: str | Path | None = None, **options: Any) -> Config:
        """Configuration from a YAML file and from options, which replace the file's.

        Keys are the fields of this class and of transformers' TrainingArguments; ``batch_size`` is its
        ``per_device_train_batch_size``. Raises FileError, and UsageError for an unknown option or a wrong value.
        """
        values = (_read_yaml(file) if file else {}) | options
        own = {each.name for each in fields(cls)} - {"trainer"}
        known = TrainingArguments.__dataclass_fields__.keys() | {"batch_size"}
        for name in values.keys() - own - known:
            near = difflib.get_close_matches(str(name), own | known, n=1)
            raise UsageError(f"there is no option {name!r}{f': did you mean {near[0]}?' if near else ''}")
        trainer = {name: values.pop(name) for name in values.keys() - own}
        if "batch_size" in trainer:
            trainer["per_device_train_batch_size"] = trainer.pop("batch_size")
        return cls(**values, trainer=trainer)

    def arguments(self) -> TrainingArguments:
        """TrainingArguments of the run. Raises UsageError for a value that they do not take."""
        values = DEFAULTS | self.defaults | dict(self.trainer)
        values.setdefault("per_device_eval_batch_size", values["per_device_train_batch_size"])
        values.setdefault("eval_strategy", "steps" if values["eval_steps"] and self.max_eval_samples else "no")
        values.setdefault("use_cpu", not torch.accelerator.is_available())
        values.setdefault("bf16", gpu_has_bfloat16() and not values["use_cpu"] and not values.get("fp16"))
        try:
            args = TrainingArguments(output_dir=self.output, **values)
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UsageError(f"transformers' TrainingArguments do not take these options: {error}") from error
        args._n_gpu = 1  # no DataParallel: its copies' gates would point to the first GPU
        return args

    def to_dict(self) -> dict[str, Any]:
        """All options as values for JSON, those of TrainingArguments beside the others."""
        values = asdict(self)
        return json.loads(json.dumps(values | values.pop("trainer")))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Options of ``skipdecode train``, which its help explains, and five for files and Python.

    Args:
        prompt_column, response_column, prompt_share: how rows are read, see :func:`~skipdecode.data.tasks.get_task`.
        prompt_decay: number of last prompt positions over which the depth falls already.
        exit_share: share of the tokens from which multi-layer exit's early exits learn, each from others.

    Example:
        >>> TrainConfig.create(model="demo", data="rows.jsonl", speedups="1,2", max_steps=20).speedups
        (1.0, 2.0)
    """

    defaults: ClassVar[dict[str, Any]] = {"learning_rate": 5e-5, "per_device_train_batch_size": 32}

    output: str = "trained"
    speedups: tuple[float, ...] = (1.0, 2.0)
    data: str = "."
    prompt_column: str | None = None
    response_column: str | None = None
    prompt_share: float | None = None
    method: str = "skipdecode"
    exit_share: float = 1.0
    decay: str | None = None
    horizon: int | None = None
    prompt_decay: int | None = None
    prompt_layers: str | int | None = None
    distill_weight: float = 0.0
    teacher: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_layers not in (None, "max"):
            object.__setattr__(self, "prompt_layers", _numbers("prompt_layers", self.prompt_layers, int)[0])
        if self.method not in ("skipdecode", "multi_exit"):
            raise UsageError(f"--method is skipdecode or multi_exit, not {self.method}")
        if self.method == "multi_exit" and (self.style or self.distill_weight or self.speedup_weights):
            raise UsageError("multi_exit trains all exits by its own loss: no layers, weights or distillation with it")
        if (self.horizon is None) != (self.decay in (None, "constant")):
            raise UsageError("--decay and --horizon go together: a depth falls over, say, the longest response")
        if self.teacher is not None and not self.distill_weight:
            raise UsageError("--teacher needs --distill-weight")
        drawn = dict(zip(self.speedups, self.speedup_weights or self.speedups, strict=True))
        if self.distill_weight == 1 and self.teacher is None and not drawn.get(1.0):
            raise UsageError("nothing keeps the full model in place: give --teacher, or 1 among --speedups")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RunConfig):
    """Options of ``skipdecode distill``, which its help explains."""

    defaults: ClassVar[dict[str, Any]] = {"learning_rate": 1.5e-3, "per_device_train_batch_size": 8}

    output: str = "fast"
    prompts: str | None = None
    eval_prompts: str | None = None
    num_texts: int = 4000
    max_new_tokens: int | None = None
    temperature: float | None = None
    engine: str = "transformers"
    adapter: str | None = None
    rank: int = 256
    lora_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speedups and min(self.speedups) <= 1:
            raise UsageError("1x is the model itself: --speedups above 1")
        if self.adapter is not None and self.style:
            raise UsageError("--adapter has its layers already: no --order or --bottom-layers with it")


def claim_output(config: RunConfig, fingerprint: str, overwrite: bool) -> Path | None:
    """Record a run in its output folder; return the newest checkpoint of the same run, from which it resumes.

    ``fingerprint`` is that of the model's files. ``overwrite`` deletes what the run before left, but texts of the same
    options.

    Raises UsageError if the folder holds another run, FileError if it holds a model that no run wrote.
    """
    folder = Path(config.output)
    record = {"config": type(config).__name__, "fingerprint": fingerprint} | config.to_dict()
    before = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    if not before and any(folder.glob("*.safetensors")):
        raise FileError(f"{folder} holds a model that no run wrote: give another --output")
    differs = {name for name in before | record if before and before.get(name) != record.get(name)}
    if overwrite:
        for path in folder.glob("checkpoint-*"):
            shutil.rmtree(path)
        for path in folder.glob("self_generated*") if differs.intersection(TEXT_OPTIONS) else ():
            path.unlink()
    elif differs := differs.difference(FREE):
        raise UsageError(f"{folder} holds a run with another {min(differs)}: give another --output, or --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / RECORD, json.dumps(record, indent=1) + "\n")
    states = folder.glob("checkpoint-*/trainer_state.json")  # the file that a checkpoint gets last
    return max((path.parent for path in states), key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _numbers(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    """Numbers of a sequence, of text like ``1,2.5``, or one."""
    try:
        return tuple(kind(item) for item in re.findall(r"[^\s,()\[\]]+", str(value)) or [""])
    except ValueError:
        raise UsageError(f"--{name.replace('_', '-')} takes numbers with commas between, not {value!r}") from None


def _read_yaml(file: str | Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FileError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise FileError(f"{file} holds no options: it needs lines like `max_steps: 100`")
    for name, value in values.items():
        if isinstance(value, str) and re.fullmatch(r"[\d.]+[eE][+-]?\d+", value):
            values[name] = float(value)  # YAML reads 5e-4 as text
    return values
