"""A benchmark from its profile to its tables: what was timed, on what machine, with which peaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UsageError
from ..files import check_target
from ..planning.profile import shape_of
from ..weights.device import machine, measure_peaks
from .bench import BenchPlan, bench
from .profiler import dtype_of
from .tables import Row, markdown_table, save_tables


@dataclass(frozen=True)
class BenchReport:
    """What was timed.

    Attributes:
        rows: plain values of each batch size and target (:meth:`skipdecode.clock.bench.Cell.row`).
        about: what must stand below them.
    """

    rows: Sequence[Row]
    about: Mapping[str, str]

    @property
    def table(self) -> str:
        """Markdown."""
        return markdown_table(HEADS, [_cells(row) for row in self.rows])

    @property
    def refusals(self) -> list[str]:
        """Why targets cannot be had."""
        return [f"batch {row['batch_size']}: {row['refused']}" for row in self.rows if "refused" in row]

    def save(self, folder: Path) -> None:
        """``table.md``, ``table.csv``, ``table.json`` and ``ratios.png``."""
        from .plots import draw_ratios

        refused = {f"refused {number}": text for number, text in enumerate(self.refusals, 1)}
        save_tables(folder, self.rows, HEADS, [_cells(row) for row in self.rows], {**self.about, **refused})
        title = f"{self.about['model']}, {self.about['dtype']}: {self.about['job']}"
        draw_ratios(self.rows, folder / "ratios.png", title)


def check_folder(folder: Path) -> None:
    """Whether a report can be written there, before hours of work. Raises FileError, UsageError."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder")
    if folder.is_dir():
        check_target(folder / "table.json")


def run_bench(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: BenchPlan,
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    command: str = "",
    on_run: Callable[[], object] = lambda: None,
) -> BenchReport:
    """Time everything, and say on what.

    Args:
        model, tokenizer: as loaded, or :func:`skipdecode.clock.model_shapes.random_model`.
        plan: what to time.
        name: of the model.
        options: how it was loaded beside type and device, as the profile has them.
        command: what made the report.
        on_run: called after each timed run.

    Raises:
        UsageError: the profile is of another machine, model, type or other options.
    """
    here, kind, options = machine(str(model.device)), dtype_of(model), dict(options or {})
    if plan.profile is not None:
        shape = shape_of(model.config)
        plan.profile.check(shape=shape, machine=here, device=model.device.type, dtype=kind, options=options)
    peaks = measure_peaks(model.device, getattr(torch, kind))
    rows = [cell.row(plan, peaks) for cell in bench(model, tokenizer, plan, on_run)]
    about = {
        "model": name,
        "command": command,
        "machine": here,
        "dtype": ", ".join([kind, *(f"{name} {value}" for name, value in options.items())]),
        "peaks": f"{peaks.bandwidth / 1e9:.1f} GB/s read by a product of one row, {peaks.matrix / 1e9:.0f} GFLOP/s "
        f"of large ones, both in {kind}",
        "job": f"{plan.prompt_tokens} prompt tokens and {plan.new_tokens} new ones in each row, end-of-sequence "
        "suppressed",
        "rounds": f"{plan.repeats} after one to warm up, all speeds of a batch size in turn, medians",
        "ratios": "full depth's figure over the row's: layers per decode step, seconds of a step, seconds of the job",
    }
    return BenchReport(rows, about)


#: Heads of the table that :func:`_cells` fills.
HEADS = (
    "batch", "asked", "depths", "prompt", "layers", "step predicted", "step got", "job predicted", "job got",
    "ms / step", "ms prompt", "tokens / s", "bandwidth", "matrix", "peak KV", "RSS after",
)  # fmt: skip


def _cells(row: Mapping[str, Any]) -> list[str]:
    """A row's figures as the table shows them."""
    start = [str(row["batch_size"]), f"{row['asked']:g}x {row['asked_of']}" if row["asked"] != 1 else "full depth"]
    if "refused" in row:
        return [*start, "cannot be had", *[""] * (len(HEADS) - 3)]

    def ratio(name: str) -> str:
        return f"{row[name]:.2f}x" if name in row else ""

    return [
        *start,
        f"{row['max_depth']} to {row['min_depth']}",
        str(row["prompt_layers"]),
        ratio("layers_ratio"),
        ratio("predicted_step_ratio"),
        ratio("step_ratio"),
        ratio("predicted_job_ratio"),
        ratio("job_ratio"),
        f"{row['step_ms']:.1f}",
        f"{row['prompt_ms']:.0f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['bandwidth_share']:.0%}",
        f"{row['matrix_share']:.0%}",
        f"{row['peak_kv_bytes'] / 1e6:.1f} MB",
        f"{row['resident_bytes'] / 1e9:.2f} GB" if row["resident_bytes"] else "",
    ]
