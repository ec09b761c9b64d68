"""``skipdecode profile``, ``plan`` and ``bench``: measure this machine, predict speed-ups, and time them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ..errors import ScheduleError, UsageError
from . import options as o
from .console import Bar, out, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Measured = Annotated[
    str | None,
    Argument(metavar="MODEL", help="Directory, hub name, or 'demo' for the embedded checkpoint; or give --shape."),
]
Shape = Annotated[
    str | None,
    Option(help="Random weights of a known shape instead: opt-1.3b, opt-6.7b, llama-3.2-1b, llama-3.1-8b, …"),
]
Batches = Annotated[str, Option("--batch", help="Batch sizes.")]
PromptTokens = Annotated[int, Option(min=1, max=o.MOST, help="Prompt tokens of each row, padding included.")]
NewTokens = Annotated[int, Option(min=2, max=o.MOST, help="New tokens of each row.")]


def profile(
    model: Measured = None,
    output: Annotated[Path, Option(help="The profile, as JSON.")] = Path("profile.json"),
    shape: Shape = None,
    batch: Batches = "1,8,32",
    context: Annotated[str, Option(help="Prompt lengths to measure at.")] = "64,256,1024,2000",
    repeats: Annotated[int, Option(min=1, max=1000, help="Rounds; the fastest counts.")] = 3,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    attention: o.Attention = None,
    quantization: o.Quantization = None,
    prepack: o.Prepack = False,
) -> None:
    """Measure what prompts and decode steps take on this machine: minutes, with nothing else computing.

    skipdecode profile --shape opt-1.3b --output opt.json
    """
    from ..clock.profiler import Profiler, check_lengths
    from ..files import check_target
    from ..planning.profile import is_profile

    sizes, lengths = _whole(batch, "--batch"), _whole(context, "--context")
    check_target(output, may_replace=is_profile)
    options = _options(attention, quantization, prepack)
    loaded, tokenizer = _load(model, shape, dtype, device, options, lambda config: check_lengths(config, lengths))
    with Bar() as bar:
        profiler = Profiler(loaded, tokenizer, repeats, lambda done, total: bar.show("measuring", done, total), options)
        measured = profiler.profile(sizes, lengths, shape or str(model))
    measured.save(output)
    say(f"wrote {output}")
    rows = []
    for step in measured.steps:
        whole = step.outside_layers + sum(step.layers[kind] for kind in measured.layers)
        seconds = (whole, step.head, step.rest, *step.layers)
        rows.append([str(step.batch_size), str(step.length), *(f"{1e3 * each:.2f}" for each in seconds)])
    heads = ["batch", "context", "full depth", "the head", "the rest", *(f"one {kind}" for kind in measured.kinds)]
    _show(f"{measured.model}, {measured.dtype}: milliseconds of a decode step", heads, rows)
    out.print(f"rounds differ by {measured.noise:.1%}; {measured.machine}", highlight=False, soft_wrap=True)
    if measured.warning:
        say(measured.warning)


def plan(
    model: Measured = None,
    profile: Annotated[Path, Option(help="What skipdecode profile wrote.")] = Path("profile.json"),
    speedups: Annotated[str, Option(help="Targets.")] = "1,1.5,2,2.5,3,4,5",
    clock: Annotated[Literal["step", "job"], Option(help="What they are of: a decode step, or a whole job.")] = "step",
    batch: Batches = "1,8,32",
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 128,
    prompt_layers: o.PromptLayers = None,
    decay: o.Decay = None,
    as_json: o.Json = False,
) -> None:
    """Show which depths give which speed-up on the clock, what cannot be had, and what to train a model with.

    skipdecode plan --profile opt.json --clock job --prompt-layers max
    """
    from ..planning.planner import Predictor, Workload
    from ..planning.planner import plan as plan_depths
    from ..planning.profile import Profile, shape_of
    from ..planning.resolve import new_schedule
    from ..weights.device import machine
    from ..weights.loading import read_config

    targets, measured = o.parse_speedups(speedups), Profile.load(profile)
    style: dict[str, Any] = {**o.style_options(decay=decay, prompt_layers=prompt_layers)}
    config = None if model is None else read_config(model)
    if config is not None:
        measured.check(shape=shape_of(config))
    rows: list[dict[str, Any]] = []
    for size in _whole(batch, "--batch"):
        predictor = Predictor(measured, [Workload(size, prompt_tokens, new_tokens)], clock)
        for target in targets:
            start = {"batch_size": size, "asked": target, "asked_of": clock}
            try:
                schedule = (
                    plan_depths(predictor, target, **style)
                    if config is None
                    else new_schedule(config, target, predictor, **style)
                )
            except ScheduleError as error:
                rows.append(start | {"refused": str(error)})
                continue
            ratios = {f"{of}_ratio": round(ratio, 3) for of, ratio in predictor.ratios(schedule).items()}
            seconds = round(predictor.seconds(schedule).job, 4)
            rows.append(start | ratios | {"job_seconds": seconds, "schedule": schedule.to_dict()})
    _show_plan(rows, f"{measured.model}: {prompt_tokens} prompt tokens, {new_tokens} new; of full depth, predicted")
    if measured.warning:
        say(measured.warning)
    here = machine(measured.device)
    out.print(f"measured on: {measured.machine}", highlight=False, soft_wrap=True)
    if here != measured.machine:
        say(f"this is another machine ({here}): what is planned holds there, not here")
    if as_json:
        print(json.dumps({"machine": measured.machine, "model": measured.model, "rows": rows}))


def _show_plan(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the table, why targets cannot be achieved, and the layer ratios to train a model for."""
    lines = []
    for row in rows:
        start = [str(row["batch_size"]), f"{row['asked']:g}x {row['asked_of']}"]
        if "refused" in row:
            lines.append([*start, "cannot be had", *[""] * 6])
            continue
        schedule = row["schedule"]
        depths = f"{schedule['max_depth']} to {schedule['min_depth']}"
        in_prompt = schedule.get("prompt_layers", schedule["num_layers"])
        ratios = (f"{row[f'{of}_ratio']:.2f}x" for of in ("layers", "step", "job"))
        lines.append([*start, depths, str(schedule["horizon"]), str(in_prompt), *ratios, f"{row['job_seconds']:.2f}"])
    _show(title, ["batch", "asked", "depths", "over steps", "prompt", "layers", "step", "job", "job s"], lines)
    refused = {row["batch_size"]: row["refused"] for row in reversed(rows) if "refused" in row}  # the first per size
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        if size in refused:
            out.print(f"batch {size}: {refused[size]}", highlight=False, markup=False, soft_wrap=True)
        had = {row["layers_ratio"] for row in rows if row["batch_size"] == size and "schedule" in row}
        if max(had, default=1) > 1:
            layers = ",".join(f"{ratio:.3g}" for ratio in sorted(had | {1.0}))
            out.print(
                f"batch {size}: train a model for these with --speedups {layers}", highlight=False, soft_wrap=True
            )


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
    decay: o.Decay = None,
    repeats: Annotated[int, Option(min=1, max=1000, help="Rounds; medians count.")] = 3,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    attention: o.Attention = None,
    quantization: o.Quantization = None,
    prepack: o.Prepack = False,
    output: Annotated[Path | None, Option(help="Folder for table.md, table.csv and table.json.")] = None,
    as_json: o.Json = False,
) -> None:
    """Time full depth and faster budgets alternately: what was asked for, and what is got, of layers, steps and jobs.

    skipdecode bench --shape opt-1.3b --speedups 1,2,3,5 --batch 1,8,32
    """
    from ..clock.bench import BenchPlan, check_folder
    from ..clock.bench import bench as run

    measured, options = o.load_profile(clock, profile), _options(attention, quantization, prepack)
    style, sizes = o.style_options(decay=decay, prompt_layers=prompt_layers), _whole(batch, "--batch")
    plan = BenchPlan(o.parse_speedups(speedups), sizes, prompt_tokens, new_tokens, clock, measured, repeats, style)
    if output:
        check_folder(output)
    loaded, tokenizer = _load(model, shape, dtype, device, options, plan.check)
    if measured is not None and measured.warning:
        say(measured.warning)
    command = f"skipdecode {shlex.join(sys.argv[1:])}"
    with Bar() as bar:
        bar.show("timing alternately", 0, plan.runs)
        report = run(loaded, tokenizer, plan, shape or str(model), options=options, command=command, on_run=bar.advance)
    out.print(report.table, highlight=False, soft_wrap=True)
    for line in (*(f"{key}: {value}" for key, value in report.about.items()), *report.refusals):
        out.print(line, highlight=False, soft_wrap=True, markup=False)
    if output:
        report.save(output)
        say(f"wrote {output}")
    if as_json:
        print(json.dumps({**report.about, "rows": report.rows}))


def _whole(text: str, option: str) -> tuple[int, ...]:
    """Parse distinct whole numbers of at least 1, like ``"1,8,32"``. Raises UsageError."""
    values = o.parse_numbers(text)
    if any(value < 1 or value != int(value) or value > o.MOST for value in values) or len(set(values)) < len(values):
        raise UsageError(f"{option} takes distinct whole numbers of at least 1 with commas between, not {text!r}")
    return tuple(map(int, values))


def _show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table whose lines are not cut to the terminal's width."""
    from ..clock.tables import markdown_table

    out.print(f"{title}\n\n{markdown_table(heads, rows)}\n", highlight=False, soft_wrap=True, markup=False)


def _options(attention: str | None, quantization: str | None, prepack: bool) -> dict[str, Any]:
    """Return the loading options, except dtype and device, as a profile stores them."""
    from ..weights.optimize import optimizations

    faster = optimizations(quantization, prepack)
    return faster | ({"attention": attention} if attention else {})


def _load(
    model: str | None,
    shape: str | None,
    dtype: str,
    device: str | None,
    options: Mapping[str, Any],
    check: Callable[[Any], object],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the checkpoint, or make random weights of the shape, after calling ``check`` with its config."""
    from ..clock.model_shapes import random_model, shape_config
    from ..weights.device import placement
    from ..weights.loading import load, read_config

    if (model is None) == (shape is None):
        raise UsageError("give either MODEL or --shape")
    if shape is None:
        check(read_config(str(model)))
        return load(str(model), dtype=dtype, device=device, **options)
    check(config := shape_config(shape))
    rest = {"attn_implementation" if name == "attention" else name: value for name, value in options.items()}
    return random_model(shape, dtype, placement(config, dtype, device)[1], **rest)
