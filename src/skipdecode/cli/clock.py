"""``skipdecode profile``, ``plan`` and ``bench``: what this machine takes, what can be had, what is got."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ..errors import ScheduleError, UsageError
from . import options as o
from .console import Bar, out, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..planning.planner import Prediction
    from ..weights.offload import Offload

Measured = Annotated[
    str | None,
    Argument(metavar="MODEL", help="Directory, hub name, or 'demo' for the embedded checkpoint; or give --shape."),
]
Shape = Annotated[
    str | None,
    Option(help="Random weights of a known shape instead: opt-1.3b, opt-6.7b, llama-3.2-1b, llama-3.1-8b, …"),
]
Batches = Annotated[str, Option("--batch", help="Batch sizes.")]
Rounds = Annotated[
    int, Option("--repeats", min=1, max=1000, help="Rounds (profile: the fastest counts; bench: medians).")
]
PromptTokens = Annotated[int, Option(min=1, max=o.MOST, help="Prompt tokens of each row, padding included.")]
NewTokens = Annotated[int, Option(min=2, max=o.MOST, help="New tokens of each row.")]


def profile(
    model: Measured = None,
    output: Annotated[Path, Option(help="The profile, as JSON.")] = Path("profile.json"),
    shape: Shape = None,
    batch: Batches = "1,8,32",
    context: Annotated[str, Option(help="Prompt lengths to measure at.")] = "64,256,1024,2000",
    repeats: Rounds = 3,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    attention: o.Attention = None,
    revision: o.Revision = None,
    quantization: o.Quantization = None,
    prepack: o.Prepack = False,
    as_json: o.Json = False,
) -> None:
    """Measure what prompts and decode steps take on this machine: minutes, with nothing else computing.

    skipdecode profile --shape opt-1.3b --output opt.json
    """
    from dataclasses import replace

    from ..clock.profiler import Profiler, check_lengths
    from ..files import check_target
    from ..planning.profile import is_profile
    from ..weights.optimize import optimizations

    sizes, lengths = _whole(batch, "--batch"), _whole(context, "--context")
    check_target(output, may_replace=is_profile)
    faster = optimizations(quantization, prepack)
    if attention:
        faster["attention"] = attention
    loaded, tokenizer = _load(
        model, shape, dtype, device, revision, faster, check=lambda config: check_lengths(config, lengths)
    )
    with Bar() as bar:
        profiler = Profiler(loaded, tokenizer, repeats, lambda done, total: bar.show("measuring", done, total))
        measured = replace(profiler.profile(sizes, lengths, shape or str(model)), options=faster)
    measured.save(output)
    say(f"wrote {output}")
    from rich.table import Table

    table = Table(title=f"{measured.model}, {measured.dtype}: milliseconds of a decode step")
    for name in ("batch", "context", "full depth", "beyond layers", *(f"one {kind}" for kind in measured.kinds)):
        table.add_column(name, justify="right")
    for step in measured.steps:
        whole = step.beyond + sum(step.layers[kind] for kind in measured.layers)
        figures = (whole, step.beyond, *step.layers)
        table.add_row(str(step.batch_size), str(step.length), *(f"{1e3 * figure:.2f}" for figure in figures))
    out.print(table)
    heads = ", ".join(f"{share:.0%} at batch {size}" for size, share in measured.head.items())
    out.print(f"of what is beyond layers, the head takes {heads}", highlight=False)
    off = {name: f"{value:.1%}" for name, value in measured.error.items()}
    out.print(f"off by, on average: {off}\n{measured.machine}", highlight=False)
    if measured.doubt:
        say(measured.doubt)
    if as_json:
        print(json.dumps(json.loads(measured.to_json())))


def plan(
    model: Measured = None,
    profile: Annotated[Path, Option(help="What skipdecode profile wrote.")] = Path("profile.json"),
    speedups: Annotated[str, Option(help="Targets.")] = "1,1.5,2,2.5,3,4,5",
    clock: Annotated[Literal["step", "job"], Option(help="What they are of: a decode step, or a whole job.")] = "step",
    batch: Batches = "1,8,32",
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 128,
    prompt_layers: o.PromptLayers = None,
    order: o.Order = None,
    decay: o.Decay = None,
    serving: o.Serving = False,
    png: Annotated[Path | None, Option(help="Draw it to this file.")] = None,
    as_json: o.Json = False,
) -> None:
    """Show which depths give which speed-up on the clock, and what cannot be had.

    skipdecode plan --profile opt.json --clock job --prompt-layers max
    """
    from ..planning.planner import Predictor, Workload, predict
    from ..planning.planner import plan as plan_depths
    from ..planning.profile import Profile, shape_of
    from ..weights.device import machine
    from ..weights.loading import read_config

    targets, measured = o.parse_speedups(speedups), Profile.load(profile)
    if png:
        from ..evaluation.plots import check_picture

        check_picture(png)
    style = o.style_options(order=order, decay=o.decay_of(decay, serving), prompt_layers=prompt_layers)
    if model is not None:
        measured.check(shape=shape_of(read_config(model)))
    rows: list[dict[str, Any]] = []
    for size in _whole(batch, "--batch"):
        predictor = Predictor(measured, [Workload(size, prompt_tokens, new_tokens)], clock)
        for target in targets:
            start = {"batch_size": size, "asked": target, "asked_of": clock}
            try:
                rows.append(start | _row(predict(predictor, target, plan_depths(predictor, target, **style))))
            except ScheduleError as error:
                rows.append(start | {"refused": str(error)})
    title = f"{measured.model}: {prompt_tokens} prompt tokens, {new_tokens} new; of full depth, predicted"
    _print_plan(rows, title)
    for row in rows:
        if "refused" in row:
            out.print(f"batch {row['batch_size']}: {row['refused']}", highlight=False, markup=False)
    if measured.doubt:
        say(measured.doubt)
    here = machine(measured.device)
    out.print(f"measured on: {measured.machine}", highlight=False)
    if here != measured.machine:
        say(f"this is another machine ({here}): what is planned holds there, not here")
    if png and not any("schedule" in row for row in rows):
        say(f"nothing can be had: {png} is not drawn")
    elif png:
        from ..clock.plots import draw_ratios

        draw_ratios(rows, png, title)
        say(f"wrote {png}")
    if as_json:
        print(json.dumps({"machine": measured.machine, "model": measured.model, "rows": rows}))


def _row(found: Prediction) -> dict[str, Any]:
    schedule = found.schedule
    return {
        "max_depth": schedule.max_depth,
        "min_depth": schedule.min_depth,
        "horizon": schedule.horizon,
        "prompt_layers": schedule.deepest,
        "layers_ratio": round(found.layers, 3),
        "predicted_step_ratio": round(found.step, 3),
        "predicted_job_ratio": round(found.job, 3),
        "job_seconds": round(found.seconds.job, 4),
        "kv_bytes": round(found.kv_bytes),
        "schedule": schedule.to_dict(),
    }


def _print_plan(rows: list[dict[str, Any]], title: str) -> None:
    from rich.table import Table

    table = Table(title=title)
    for name in ("batch", "asked", "depths", "prompt", "layers", "step", "job", "job s", "peak KV"):
        table.add_column(name, justify="right")
    for row in rows:
        start = (str(row["batch_size"]), f"{row['asked']:g}x {row['asked_of']}")
        if "refused" in row:
            table.add_row(*start, "[yellow]cannot be had[/]")
            continue
        ratios = (f"{row[name]:.2f}x" for name in ("layers_ratio", "predicted_step_ratio", "predicted_job_ratio"))
        depths = f"{row['max_depth']} to {row['min_depth']}"
        last = (f"{row['job_seconds']:.2f}", f"{row['kv_bytes'] / 1e6:.1f} MB")
        table.add_row(*start, depths, str(row["prompt_layers"]), *ratios, *last)
    out.print(table)


def bench(
    model: Measured = None,
    shape: Shape = None,
    speedups: Annotated[str, Option(help="Targets; full depth is timed beside them.")] = "1,2,3,5",
    clock: o.Clock = "layers",
    profile: o.ProfileFile = None,
    batch: Batches = "1,8,32",
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 128,
    prompt_layers: o.PromptLayers = None,
    order: o.Order = None,
    decay: o.Decay = None,
    repeats: Rounds = 3,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    attention: o.Attention = None,
    revision: o.Revision = None,
    quantization: o.Quantization = None,
    prepack: o.Prepack = False,
    offload: o.OffloadTo = None,
    max_memory: o.MaxMemory = None,
    offload_folder: o.OffloadFolder = None,
    output: Annotated[Path | None, Option(help="Folder for table.md, table.csv, table.json and a plot.")] = None,
    as_json: o.Json = False,
) -> None:
    """Time full depth and faster budgets alternately: what was asked for, and what is got, of layers, steps and jobs.

    skipdecode bench --shape opt-1.3b --speedups 1,2,3,5 --batch 1,8,32
    """
    from ..clock.bench import BenchPlan, runs_of
    from ..clock.bench_report import check_folder, run_bench
    from ..planning.clock import warnings_of
    from ..weights.optimize import optimizations

    measured, away = o.load_profile(clock, profile), o.offload_of(locals())
    style = o.style_options(order=order, decay=decay, prompt_layers=prompt_layers)
    sizes = _whole(batch, "--batch")
    plan = BenchPlan(o.parse_speedups(speedups), sizes, prompt_tokens, new_tokens, clock, measured, repeats, style)
    if measured is not None and away is not None:
        raise UsageError("a profile knows no offload: leave one of --profile and --offload out")
    if output:
        check_folder(output)
    options = optimizations(quantization, prepack) | ({"attention": attention} if attention else {})
    loaded, tokenizer = _load(model, shape, dtype, device, revision, options, away, plan.check)
    for doubt in warnings_of(measured) if measured is not None else []:
        say(doubt)
    command = f"skipdecode {shlex.join(sys.argv[1:])}"
    with Bar() as bar:
        bar.show("timing alternately", 0, runs_of(plan))
        name = shape or str(model)
        report = run_bench(loaded, tokenizer, plan, name, options=options, command=command, on_run=bar.advance)
    out.print(report.table, highlight=False, soft_wrap=True)
    for line in (*(f"{key}: {value}" for key, value in report.about.items()), *report.refusals):
        out.print(line, highlight=False, soft_wrap=True, markup=False)
    if output:
        report.save(output)
        say(f"wrote {output}")
    if as_json:
        print(json.dumps({**report.about, "rows": report.rows}))


def _whole(text: str, option: str) -> tuple[int, ...]:
    """``"1,8,32"`` as distinct whole numbers of at least 1. Raises UsageError."""
    values = o.parse_numbers(text)
    if any(value < 1 or value != int(value) or value > o.MOST for value in values) or len(set(values)) < len(values):
        raise UsageError(f"{option} takes distinct whole numbers of at least 1 with commas between, not {text!r}")
    return tuple(map(int, values))


def _load(
    model: str | None,
    shape: str | None,
    dtype: str,
    device: str | None,
    revision: str | None,
    faster: Mapping[str, Any],
    offload: Offload | None = None,
    check: Callable[[Any], object] = lambda config: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The checkpoint, or random weights of the shape."""
    from ..clock.model_shapes import random_model, shape_config
    from ..weights.device import placement
    from ..weights.loading import load, read_config

    if (model is None) == (shape is None):
        raise UsageError("give either MODEL or --shape")
    if shape is None:
        check(read_config(str(model), revision))
        placed: dict[str, Any] = {"dtype": dtype, "device": device, "revision": revision}
        return load(str(model), offload=offload, **placed, **faster)
    if offload is not None or revision is not None:
        raise UsageError("random weights are made in memory, and have no revision: leave --offload and --revision out")
    check(config := shape_config(shape))
    rest = {"attn_implementation" if name == "attention" else name: value for name, value in faster.items()}
    return random_model(shape, dtype, placement(config, dtype, device)[1], **rest)
