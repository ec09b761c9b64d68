"""TrainingPlan: the options of ``skipdecode train``, which are also the keys of a run's YAML or JSON file."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from ..errors import UsageError
from ..evaluation.methods import MethodName, get_method
from ..model.config import ADAPTER_FILE, DEFAULT_HORIZON, DEFAULT_METHOD, DEFAULT_SPEEDUP, num_layers, schedules_of
from ..schedule import Schedule, parse_prompt_layers
from . import form
from .options import convert_value, option, option_name, read_order, read_run_file, read_schedule

#: Upper limit of counts: no run needs more, and far more could hang or exhaust the memory.
MANY = 1_000_000
#: Upper limit of a batch's decode steps; fitting a schedule takes 1 to 2 ms per step.
LONGEST = 100_000
#: Options that exclude each other: one on the command line removes its whole group from the file's options.
EITHER_OR = (("speedup", "speedups"), ("model", "from_config"), ("max_steps", "num_train_epochs"))

#: Learning rates of all weights with AdamW, and of adapters with Muon; and the rows of a batch, of all weights.
RATE, ADAPTER_RATE, ROWS = 5e-5, 1.5e-3, 32
#: Options that name files or folders of the user's.
FILES = frozenset("data prompts adapter teacher from_config tokenizer schedule".split())

DATA = "Data"
ADAPTERS = "Adapters and own texts"
BUDGETS = "Budgets and schedules"
DISTILLATION = "Distillation"
OPTIMIZER = "Optimizer"
MEMORY = "Memory and speed"
REPORTS = "Evaluation, checkpoints and reports"
SCRATCH = "From scratch"


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The options of one training run.

    Every field is an option of ``skipdecode train``, whose help explains it (``max_steps`` is ``--max-steps``), and a
    key of a run's file. Fields named as in TrainingArguments mean the same; ``batch_size`` is its
    ``per_device_train_batch_size``. A list may also be a string with commas.

    Raises:
        UsageError: a field cannot have its value, or fields contradict each other.
        ScheduleError: ``schedule`` or ``prompt_layers`` cannot be read.
        FileError: ``adapter`` is missing or damaged.

    Example:
        >>> TrainingPlan(model="demo", data="rows.jsonl", speedups=(1, 2, 5)).budgets
        (1.0, 2.0, 5.0)
    """

    model: str | None = option(
        None, "Directory, hub name, GGUF file, or 'demo' for the embedded checkpoint; leave it out with --from-config."
    )
    output: str = option("trained", "Folder for the trained checkpoint.")
    data: str | None = option(
        None, "Folder with the task's files, a JSONL or CSV file, or with --task a hub data set (default: .)."
    )
    speedup: float | None = option(None, "Train for this one target speed-up (default: 2).", least=1)
    speedups: tuple[float, ...] | None = option(
        None, "Train for several, e.g. 1,2,3,4,5; each step draws one, with --adapters takes all.", least=1
    )
    num_train_epochs: float = option(float(form.EPOCHS), "Passes over the data.", most=MANY)
    max_steps: int | None = option(None, "Stop after N optimizer steps instead.", least=1, most=10**9)
    batch_size: int | None = option(
        None, "Rows per process and batch (default: 32; 8 with --adapters).", least=1, most=MANY
    )
    gradient_accumulation_steps: int = option(1, "Batches per optimizer step.", least=1, most=MANY)
    learning_rate: float | None = option(None, "Peak learning rate (default: 5e-5; 1.5e-3 with --adapters).")
    seed: int = option(0, "Seed of new weights, data order, budgets and dropout.")

    task: Literal["jsonl", "e2e", "reddit_tldr", "cnn_dm"] = option(
        "jsonl", "jsonl takes any rows; the others are data sets with a prompt format.", DATA
    )
    prompt_column: str | None = option(None, "Column of the prompts, if it is not prompt, messages or text.", DATA)
    response_column: str | None = option(None, "Column of the responses, if it is not response or completion.", DATA)
    prompt_share: float | None = option(
        None,
        "Rows of plain text: this share of the words is the prompt; 0: only the begin-of-text token.",
        DATA,
        most=0.99,
    )
    max_eval_samples: int = option(100, "Validation inputs used for the loss.", DATA)

    own_texts: int | None = option(
        None,
        "Learn from N texts that the model itself writes at full depth, in place of data.",
        ADAPTERS,
        least=20,
        most=MANY,
    )
    prompts: str | None = option(
        None,
        "File with the own texts' prompts (default: those of --data, else a chat model's own, else the begin-of-text "
        "token alone).",
        ADAPTERS,
    )
    max_new_tokens: int | None = option(
        None, "Longest own text, in tokens (default: the task's).", ADAPTERS, least=2, most=LONGEST
    )
    temperature: float | None = option(
        None,
        "Of the sampling of own texts, like the one you will write with (default: 0.5; without any prompts 1, the "
        "model's own distribution).",
        ADAPTERS,
        most=10,
    )
    engine: Literal["transformers", "vllm"] = option("transformers", "Writes the own texts.", ADAPTERS)
    adapters: bool | None = option(
        None,
        "Learn small maps in the place of skipped layers, and leave the model as it is (default: with --own-texts).",
        ADAPTERS,
    )
    adapter_rank: int = option(form.RANK, "Rank of these maps.", ADAPTERS, least=1, most=10_000)
    adapter: str | None = option(
        None,
        "Begin with this adapter of MODEL, or of the model that MODEL was fine-tuned from: its layers, rank and "
        "weights, and all its speed-ups unless you name some. MODEL may be the adapter's folder itself.",
        ADAPTERS,
    )

    method: MethodName = option("skipdecode", "SkipDecode, or a baseline to compare it with.", BUDGETS)
    weights: tuple[float, ...] | None = option(
        None,
        "How often each of --speedups is drawn, or counts with --adapters, e.g. 2,1,3 (default: equally).",
        BUDGETS,
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "Decode steps of batches to fit schedules to, as calibrate --json has them (default: those of the responses).",
        BUDGETS,
        least=1,
        most=LONGEST,
    )
    horizon: int | None = option(
        None, "Take the paper's budgets over N generated tokens, instead of fitting.", BUDGETS, least=1, most=MANY
    )
    order: str | tuple[int, ...] | None = option(
        None, "Layer order: top, bottom, even, or all layers (0,2,1,…), longest running first (default: top).", BUDGETS
    )
    decay: Literal["linear", "cosine", "exponential", "power", "step", "constant"] | None = option(
        None, "Shape of the fall of the depth (default: linear; with --adapters constant).", BUDGETS
    )
    warmup_layers: int | None = option(
        None, "Bottom layers that order top never skips (default: 1; with --adapters a sixth of all, or less).", BUDGETS
    )
    prompt_decay: int | None = option(
        None, "Let the depth fall over the last N prompt positions already (default: 0).", BUDGETS, most=MANY
    )
    prompt_layers: str | int | None = option(
        None, "Layers that the prompt runs: a number, or max for as many as step 0 (default: all).", BUDGETS
    )
    schedule: Schedule | None = option(
        None, "Train for the schedule in this JSON file; --speedup sets the label it is stored under.", BUDGETS
    )

    distill_weight: float = option(
        0.0, "Weight of the distance from full depth's logits in the loss; 0: none.", DISTILLATION, most=1
    )
    teacher: str | None = option(
        None, "Distil from this model (default: from the trained one itself at full depth).", DISTILLATION
    )

    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = option("cosine", "Learning-rate schedule.", OPTIMIZER)
    warmup_steps: float = option(
        0.03, "Warm-up steps of the learning rate; below 1: a share of all steps.", OPTIMIZER, most=10**9
    )
    weight_decay: float = option(0.01, "Weight decay.", OPTIMIZER)
    adam_beta2: float = option(0.999, "Second beta of AdamW, which trains all weights.", OPTIMIZER, most=1)

    lora_rank: int = option(
        0, "Rank of LoRA adapters, merged at the end and kept in OUTPUT/adapter too; 0: none.", MEMORY, most=10_000
    )
    bf16: bool = option(False, "Compute in bfloat16; weights that are trained stay float32.", MEMORY)
    gradient_checkpointing: bool = option(False, "Recompute activations: less memory, more time.", MEMORY)
    attn_implementation: str | None = option(
        None, "eager, sdpa, …; transformers' choice if left out. On CPUs eager is faster for short texts.", MEMORY
    )

    eval_steps: int = option(500, "Evaluate every N steps; 0: never.", REPORTS)
    save_steps: int = option(500, "Write a checkpoint to resume from every N steps.", REPORTS, least=1)
    report_to: tuple[str, ...] = option(("none",), "Trackers that get the losses, e.g. tensorboard,wandb.", REPORTS)

    from_config: str | None = option(
        None, "Train random weights: the config.json of a transformers model, in place of MODEL.", SCRATCH
    )
    tokenizer: str | None = option(None, "Take this tokenizer (default: byte-level BPE, trained on the data).", SCRATCH)

    def __post_init__(self) -> None:
        if (self.model is None) == (self.from_config is None):
            raise UsageError("give either MODEL or --from-config")
        if (self.speedups is not None) and (self.speedup is not None or self.schedule is not None):
            raise UsageError("give one of --speedup, --speedups and --schedule")
        for name, (kind, about) in option_fields().items():
            convert = {"order": read_order, "schedule": read_schedule, "prompt_layers": parse_prompt_layers}.get(name)
            value = getattr(self, name)
            object.__setattr__(self, name, convert(value) if convert else convert_value(name, kind, value, about))
        if self.model and (Path(self.model) / ADAPTER_FILE).is_file():
            from ..model.adapter import read_about  # not above: the command line's help needs no torch

            object.__setattr__(self, "adapter", self.adapter or self.model)
            object.__setattr__(self, "model", read_about(Path(self.model))["base_model"])
        self._check_combinations()

    @property
    def learns_adapter(self) -> bool:
        """Tell whether an adapter learns, and the model stays as it is."""
        if self.adapters is None:
            return self.own_texts is not None or self.adapter is not None
        return self.adapters

    @property
    def rate(self) -> float:
        """Return the peak learning rate."""
        if self.learning_rate is None:
            return ADAPTER_RATE if self.learns_adapter else RATE
        return self.learning_rate

    @property
    def rows(self) -> int:
        """Return the rows per process and batch; an adapter's as `results/smollm2` was learnt."""
        return self.batch_size or (form.ROWS if self.learns_adapter else ROWS)

    @property
    def budgets(self) -> tuple[float, ...]:
        """Return the target speed-ups to train for."""
        if self.speedups is not None:
            return self.speedups
        if self.speedup is not None:
            return (self.speedup,)
        if self.adapter:
            return tuple(self.begun)
        return (self.schedule.target,) if self.schedule else (DEFAULT_SPEEDUP,)

    @property
    def begun(self) -> dict[float, Schedule]:
        """Return the schedules of the adapter to begin with; none without one. Raises FileError if it is damaged."""
        if self.adapter is None:
            return {}
        from ..model.adapter import locate_adapter, read_schedules

        return read_schedules(locate_adapter(self.adapter))

    @property
    def style(self) -> dict[str, Any]:
        """Return the schedule fields that the user set; for the others a model with schedules keeps its own."""
        fields = {"order": self.order, "decay": self.decay, "warmup": self.warmup_layers}
        fields |= {"prompt_decay": self.prompt_decay, "prompt_layers": self.prompt_layers}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def layers(self) -> dict[str, Any]:
        """Return the part of the style that says which layers run at a constant depth."""
        keys = ("order", "warmup", "decay") if self.decay == "constant" else ("order", "warmup")
        return {key: value for key, value in self.style.items() if key in keys}

    def style_for(self, config: Any) -> dict[str, Any]:
        """Return the fields of a model's schedules that are not the defaults.

        Adapters skip one stretch of layers, the same at every step.
        """
        if not get_method(self.method).takes_style:
            return {}
        if not self.learns_adapter or schedules_of(config, self.method):
            return self.style
        style: dict[str, Any] = {"decay": "constant"}
        if self.order in (None, "top"):
            style["warmup"] = form.warmup_layers(num_layers(config), max(self.budgets))
        return style | self.style

    def first_schedules(self, config: Any) -> dict[float, Schedule]:
        """Return schedules by target speed-up, before they are fitted to texts.

        Raises ScheduleError if the plan's does not fit the model, or none can be made for it.
        """
        layers, horizon = num_layers(config), self.horizon or DEFAULT_HORIZON
        if self.adapter:
            begun = self.begun
            return {speedup: begun[speedup] for speedup in self.budgets}
        if self.schedule:
            return {self.budgets[0]: self.schedule}
        style = self.style_for(config)
        return {speedup: Schedule.for_speedup(speedup, layers, horizon, **style) for speedup in self.budgets}

    def _check_combinations(self) -> None:
        method, name, shares = get_method(self.method), self.method, self.weights
        self._check_adapters()
        if self.tokenizer and not self.from_config:
            raise UsageError("--tokenizer goes with --from-config: MODEL has one of its own")
        if len(set(self.budgets)) < len(self.budgets):
            raise UsageError(f"--speedups must be distinct, not {self.speedups}")
        if self.num_train_epochs == 0 or self.adam_beta2 == 1:
            raise UsageError("--num-train-epochs must be above 0, and --adam-beta2 below 1")
        style = {key for key in self.style if not (method.takes_layers and key in self.layers)}
        if (self.schedule or self.horizon or style) and not method.takes_style:
            options = "--schedule, --horizon, --order, --decay, --warmup-layers, --prompt-decay and --prompt-layers"
            raise UsageError(f"{options} do not go with {name}, which has rules of its own")
        if self.schedule and (self.horizon or self.lengths or self.style):
            raise UsageError("--schedule says it all: no --horizon, --lengths, --order, --decay or the like beside it")
        if self.horizon and self.lengths:
            raise UsageError("--horizon takes the paper's budgets, --lengths fits to lengths: give one of them")
        if self.distill_weight == 0 and self.teacher:
            raise UsageError("--teacher goes with --distill-weight")
        drawn = [each for each, share in zip(self.budgets, shares or [1] * len(self.budgets), strict=False) if share]
        if self.distill_weight == 1 and not self.teacher and 1 not in drawn:
            raise UsageError(
                "nothing would hold full depth in place, from which the model learns: give it a --teacher, a "
                "--distill-weight below 1, or 1 among the --speedups that are drawn"
            )
        if self.distill_weight and method.trains_exits:
            raise UsageError(f"{name} has a loss of its own: --distill-weight does not go with it")
        if self.distill_weight and not self.teacher and not method.skips:
            raise UsageError(f"{name} always runs all layers it has: to distil, give it a --teacher")
        if shares and (len(shares) != len(self.budgets) or not 0 < sum(shares) < math.inf):
            raise UsageError(f"--weights needs a number for each of {len(self.budgets)} speed-ups, not all of them 0")
        if shares and method.trains_exits:
            raise UsageError(f"{name} trains all exits in every step: --weights does not go with it")
        if len(self.budgets) > 1 and method.model_per_speedup:
            raise UsageError(f"{name} makes a model per budget: give --speedup")

    def _check_adapters(self) -> None:
        writing = ("prompts", "max_new_tokens", "engine", "temperature")
        if not self.own_texts and (wrong := [n for n in writing if getattr(self, n) != getattr(TrainingPlan, n)]):
            raise UsageError(f"{option_name(wrong[0])} goes with --own-texts")
        if self.temperature == 0:
            raise UsageError("--temperature must be above 0: own texts are sampled")
        if self.prompts and self.data:
            raise UsageError("own texts follow the prompts of one of --prompts and --data: leave one out")
        if self.own_texts and self.from_config:
            raise UsageError("--own-texts needs a model that can write, not --from-config")
        if not self.learns_adapter:
            if self.adapter:
                raise UsageError("--adapter begins an adapter with another: it does not go with --no-adapters")
            if self.adapter_rank != TrainingPlan.adapter_rank:
                raise UsageError("--adapter-rank goes with --adapters: without, all weights learn")
            return
        if self.adapter:
            own = ("schedule", "horizon", "lengths")
            if self.style or any(getattr(self, n) for n in own) or self.adapter_rank != TrainingPlan.adapter_rank:
                raise UsageError("--adapter brings its layers and its rank: no option that chooses them goes with it")
            if other := [f"{each:g}" for each in self.budgets if each not in self.begun]:
                known = ", ".join(f"{each:g}" for each in self.begun)
                raise UsageError(f"{self.adapter} has no speed-up {other[0]} to begin with: it has {known}")
        changing = ("lora_rank", "distill_weight", "teacher", "from_config", "gradient_checkpointing")
        if wrong := [option_name(name) for name in changing if getattr(self, name)]:
            raise UsageError(
                f"{wrong[0]} goes with --no-adapters: adapters leave the model as it is, and learn its full depth"
            )
        if self.method != DEFAULT_METHOD:
            raise UsageError(
                f"adapters are for the method {DEFAULT_METHOD}, not for {self.method}: --no-adapters trains all weights"
            )
        prompt = self.schedule.prompt_layers is not None or self.schedule.prompt_decay if self.schedule else False
        if self.prompt_layers is not None or self.prompt_decay or prompt:
            raise UsageError("adapters leave the prompt to the full model: no --prompt-layers, no --prompt-decay")
        if self.adam_beta2 != TrainingPlan.adam_beta2:
            raise UsageError("--adam-beta2 is AdamW's, and adapters learn with Muon: leave it out")
        if min(self.budgets) <= 1:
            raise UsageError("with adapters 1x is the model itself: --speedups above 1")

    def check(self, config: Any) -> None:
        """Check the plan against the model's config.

        Raises:
            UsageError: a tracker in ``report_to`` is not installed.
            ScheduleError: the schedule does not fit the model, or none can be made for it.
        """
        from transformers.integrations import get_available_reporting_integrations

        layers = num_layers(config)
        if self.adapter:
            from ..model.adapter import locate_adapter, read_adapter
            from ..model.inspect import text_config

            size, width = read_adapter(locate_adapter(self.adapter)).size, text_config(config).hidden_size
            there = next(iter(self.begun.values())).num_layers
            if (size, there) != (width, layers):
                raise UsageError(
                    f"the adapter in {self.adapter} is for {there} layers of width {size}: this model has {layers} "
                    f"of width {width}"
                )
        for speedup, schedule in self.first_schedules(config).items():
            if self.learns_adapter and schedule.is_full:
                raise UsageError(f"{speedup:g}x of {layers} layers is all of them: an adapter has nothing to learn")
        missing = sorted({*self.report_to} - {"none", *(known := get_available_reporting_integrations())})
        if missing:
            raise UsageError(
                f"--report-to: {', '.join(missing)} is not installed; here are {', '.join(known) or 'none'}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values for JSON or YAML."""
        values = {name: getattr(self, name) for name in option_fields()}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return plain | ({"schedule": self.schedule.to_dict()} if self.schedule else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str | Path = "the plan") -> TrainingPlan:
        """Make a plan from some or all of its fields. Raises UsageError, naming ``source``, for an unknown field."""
        for key in values:
            if key not in option_fields():
                near = difflib.get_close_matches(str(key), option_fields(), n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(option_fields())}"
                raise UsageError(f"{source}: there is no option {str(key)!r}: {hint}")
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> TrainingPlan:
        """Read a plan from a YAML or JSON file, or from the ``training.json`` that a run has written.

        Args:
            path: the file; fields that it leaves out have their defaults.
            overrides: fields that replace the file's.

        Raises:
            FileError: the file cannot be read, or holds no plan.
            UsageError, ScheduleError: a field does not exist, or cannot have its value.
        """
        values = read_run_file(Path(path))
        for group in EITHER_OR:
            if any(name in overrides for name in group):
                values = {name: value for name, value in values.items() if name not in group}
        return cls.from_dict(values | overrides, path)


def command_of(values: Mapping[str, Any]) -> str:
    """Return the command line of a run's options, less the defaults; DATA and the like stand for files."""
    words = ["skipdecode", "train", *(["MODEL"] if values.get("model") else [])]
    for each in fields(TrainingPlan):
        value = values.get(each.name)
        items = value if isinstance(value, (list, tuple)) else [value]
        if value in (None, each.default) or each.name in ("model", "output", "report_to"):
            continue
        if isinstance(value, bool):
            words += [option_name(each.name if value else f"no_{each.name}")]
        elif each.name in FILES:
            words += [option_name(each.name), each.name.upper()]
        else:
            shown = ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
            words += [option_name(each.name), shown]
    return shlex.join(words)


@cache
def option_fields() -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return the type and metadata (help, group, least, most) of each field, by name."""
    types = get_type_hints(TrainingPlan)
    return {each.name: (types[each.name], each.metadata) for each in fields(TrainingPlan)}
