"""Quality x layers x clock x memory: one row per method and budget, each paired with the full model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import trained
from .benchmark import alternate
from .fitting import achieved
from .generation import Generated, Plan, generate_ids, positions
from .jobs import fingerprint, identity
from .loading import load, resolve
from .losses import batches_of, loss_by_position
from .methods import Method, get_method
from .methods.calm import Calm
from .metrics import DEFAULT, Metric, bootstrap
from .prompts import encode_prompts
from .schedule import Schedule
from .tasks import Example, Task


@dataclass(frozen=True)
class Arm:
    """One method at one target speed-up, on one checkpoint."""

    method: str
    speedup: float
    model: str

    @property
    def key(self) -> str:
        """Names its files."""
        return f"{self.method}-{self.speedup:g}x"


def arms(methods: str, model: str, speedups: Sequence[float]) -> list[Arm]:
    """What ``skipdecode,unified=DIR,static=DIR-{speedup}`` asks for; the full model comes first, once.

    A method without a checkpoint of its own runs on ``model``. Raises ValueError for what no method is called.
    """
    found: dict[str, str] = {"full": model}
    for part in filter(None, methods.split(",")):
        name, _, own = part.strip().partition("=")
        get_method(name)
        found[name] = own or model
    result = [Arm("full", 1.0, found.pop("full"))]
    for name, own in found.items():
        # On a checkpoint of its own, a method that serves every budget is worth a row at full depth too.
        own_full = get_method(name).shared and name != "calm" and own != result[0].model
        targets = [k for k in speedups if k > 1 or own_full]
        result += [Arm(name, k, own.replace("{speedup}", f"{k:g}")) for k in targets]
    return result


@dataclass
class Bench:
    """What every arm is measured on. ``examples`` are scored; ``held_out`` sets lengths, thresholds and losses.

    Attributes:
        timing_rows: how many of the examples are timed.
        repeats: rounds timed, the full model and the arm in turn.
        samples: corpora resampled for the intervals.
    """

    task: Task
    examples: Sequence[Example]
    held_out: Sequence[Example]
    batch_size: int = 32
    max_new_tokens: int = 0
    timing_rows: int = 64
    repeats: int = 5
    samples: int = 1000
    metrics: Sequence[Metric] = DEFAULT
    dtype: str = "auto"
    device: str | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})

    def __post_init__(self) -> None:
        self.max_new_tokens = self.max_new_tokens or self.task.max_new_tokens

    def run(
        self, model: PreTrainedModel, tokens: PreTrainedTokenizerBase, prompts: Sequence[str], plan: Plan, **more: Any
    ) -> Generated:
        """Texts for these prompts; rows that the model has no positions for are an error."""
        ids = encode_prompts(tokens, prompts)
        room, longest = positions(model), max(map(len, ids)) + self.max_new_tokens
        if room is not None and longest > room:
            raise ValueError(f"the longest prompt and max_new_tokens need {longest} positions, the model has {room}")
        options = self.options | {"max_new_tokens": self.max_new_tokens} | more
        return generate_ids(model, tokens, ids, plan, self.batch_size, **options)


class Evaluation:
    """Runs arms, keeps each finished one in ``folder``: started again after a kill, it does only the rest."""

    def __init__(self, bench: Bench, folder: Path, on_run: Callable[[str], object] = lambda what: None) -> None:
        self.bench = bench
        self.folder = folder
        self.on_run = on_run
        self._loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
        self._lengths: list[int] = []

    def rows(self, wanted: Sequence[Arm]) -> list[dict[str, Any]]:
        """One finished row per arm, in their order; the first is the full model that all are paired with."""
        reference = wanted[0]
        result: list[dict[str, Any]] = []
        for arm in wanted:
            job = self._job(arm, reference)
            path = self.folder / "rows" / f"{arm.key}.json"
            row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if row.get("job") != job:
                self.on_run(f"{arm.key}: {arm.model}")
                row = {"job": job} | self._measure(arm, reference)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            result.append(row)
        return result

    def _job(self, arm: Arm, reference: Arm) -> str:
        bench = self.bench
        models = [identity(resolve(name)) for name in (arm.model, reference.model)]
        numbers = (bench.batch_size, bench.max_new_tokens, bench.timing_rows, bench.repeats, bench.samples)
        texts = [asdict(example) for example in (*bench.examples, *bench.held_out)]
        names = [metric.name for metric in bench.metrics]
        return fingerprint(asdict(arm), models, numbers, texts, names, bench.options, bench.dtype)

    def _load(self, name: str, reference: Arm) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if name not in self._loaded:
            # The reference stays; of the others, the one in use.
            self._loaded = {k: v for k, v in self._loaded.items() if k == reference.model}
            self._loaded[name] = load(name, dtype=self.bench.dtype, device=self.bench.device)
        return self._loaded[name]

    def lengths(self, reference: Arm) -> list[int]:
        """Decode steps of the full model's batches on the held-out prompts."""
        if not self._lengths:
            model, tokens = self._load(reference.model, reference)
            self._lengths = self.bench.run(model, tokens, [e.prompt for e in self.bench.held_out], None).lengths
        return self._lengths

    def _plan(self, arm: Arm, reference: Arm) -> tuple[Plan, Schedule | None]:
        """How to decode, and the schedule of teacher forcing (confidence has none)."""
        model, _ = self._load(arm.model, reference)
        method, layers = get_method(arm.method), model.config.get_text_config(decoder=True).num_hidden_layers
        if arm.method == "full" or not method.shared:
            return None, Schedule.full(layers)
        if isinstance(method, Calm):
            return self._calm(method, arm, reference), None
        known = trained.schedules(model.config) if trained.method(model.config) == arm.method else {}
        plan = known.get(arm.speedup) or method.schedule(layers, arm.speedup, self.lengths(reference))
        return plan, plan

    def _calm(self, method: Calm, arm: Arm, reference: Arm) -> Plan:
        """The threshold, bisected on held-out prompts, at which single tokens run ``speedup`` times fewer layers."""
        model, tokens = self._load(arm.model, reference)
        horizon = max(self.lengths(reference))
        prompts = [e.prompt for e in self.bench.held_out[: 2 * self.bench.batch_size]]
        low, high = 0.0, 1.2  # at 1.2 the threshold stays above 1 to the end: no token leaves
        for _ in range(7):
            middle = (low + high) / 2
            plan = method.decoder(model, middle, horizon, tokens.pad_token_id)
            cost = self.bench.run(model, tokens, prompts, plan).cost
            low, high = (low, middle) if cost.num_layers / cost.row_depth < arm.speedup else (middle, high)
        return method.decoder(model, (low + high) / 2, horizon, tokens.pad_token_id)

    def _measure(self, arm: Arm, reference: Arm) -> dict[str, Any]:
        bench = self.bench
        full, full_tokens = self._load(reference.model, reference)
        model, tokens = self._load(arm.model, reference)
        layers = full.config.get_text_config(decoder=True).num_hidden_layers
        plan, schedule = self._plan(arm, reference)
        prompts = [example.prompt for example in bench.examples]
        result = bench.run(model, tokens, prompts, plan)
        texts = [row.text for row in result.rows]
        self._keep(arm, texts)
        cost = result.cost
        row: dict[str, Any] = {
            "method": arm.method,
            "label": get_method(arm.method).label,
            "model": arm.model,
            "target": arm.speedup,
            "layers": round(cost.average_depth, 3),
            "layer_ratio": round(layers / cost.average_depth, 3),
            "token_layer_ratio": round(layers / cost.row_depth, 3),
            "prompt_layers": cost.num_layers,
            "tokens": cost.tokens,
            "steps": cost.steps,
            "peak_kv_bytes": cost.peak_kv_bytes,
        }
        row |= self._scores(texts, reference)
        if schedule is not None:
            batches = batches_of(bench.held_out, tokens, model, bench.batch_size)
            loss, row["loss_by_position"] = loss_by_position(model, batches, schedule)
            row["loss"] = round(loss, 4)
            row["schedule"] = schedule.to_dict()
        timed = prompts[: bench.timing_rows]
        runs: dict[str, Callable[[], Generated]] = {
            "full": lambda: bench.run(full, full_tokens, timed, None),
            "arm": lambda: bench.run(model, tokens, timed, plan),
        }
        timing = alternate(runs, bench.repeats)
        per_1k = {name: 1e3 * t.seconds / t.cost.tokens for name, t in timing.items()}
        return row | {
            "seconds_per_1k_tokens": round(per_1k["arm"], 4),
            "clock_ratio": round(per_1k["full"] / per_1k["arm"], 3),
            "step_ms": round(timing["arm"].step_ms, 3),
            "decode_clock_ratio": round(timing["full"].step_ms / timing["arm"].step_ms, 3),
        }

    def _keep(self, arm: Arm, texts: Sequence[str]) -> None:
        path = self.folder / "texts" / f"{arm.key}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(" ".join(text.split()) + "\n" for text in texts), encoding="utf-8")

    def _scores(self, texts: Sequence[str], reference: Arm) -> dict[str, Any]:
        """Each metric, how far it is from the full model's, and the 95% interval of that."""
        references = [example.references for example in self.bench.examples]
        stock = (self.folder / "texts" / f"{reference.key}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        result: dict[str, Any] = {}
        for metric in self.bench.metrics:
            mine, theirs = (
                metric.rows([" ".join(text.split()) for text in texts], references),
                metric.rows(stock, references),
            )
            count = len(references)
            score, base = metric.corpus(mine.sum(0), count), metric.corpus(theirs.sum(0), count)
            low, high = bootstrap(metric, mine, theirs, self.bench.samples)
            result |= {
                metric.name: round(score, 2),
                f"{metric.name}_difference": round(score - base, 2),
                f"{metric.name}_interval": [round(low, 2), round(high, 2)],
            }
        return result


__all__ = ["Arm", "Bench", "Evaluation", "Method", "achieved", "arms"]
