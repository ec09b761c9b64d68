"""``skipdecode profile``, ``plan`` and ``bench``: measure this machine, predict speed-ups, and time them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ..errors import ScheduleError, UsageError
from . import options as o
from .console import Bar, out, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..latency.profile import Profile

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
    given = locals()
    from ..files import check_target
    from ..latency.profile import is_profile
    from ..latency.profiler import STEPS, Profiler

    sizes, lengths = o.parse_numbers(batch, "--batch", int), o.parse_numbers(context, "--context", int)
    check_target(output, may_replace=is_profile)
    loaded, tokenizer, name, options = _load(given, max(lengths) + STEPS + 1)
    with Bar() as bar:
        profiler = Profiler(loaded, tokenizer, repeats, lambda done, total: bar.show("measuring", done, total), options)
        measured = profiler.profile(sizes, lengths, name)
    measured.save(output)
    say(f"wrote {output}")
    rows = []
    for step in measured.steps:
        whole = step.outside_layers + sum(step.layers[kind] for kind in measured.layers)
        seconds = (whole, step.head, step.rest, *step.layers)
        rows.append([str(step.batch_size), str(step.length), *(f"{1e3 * each:.2f}" for each in seconds)])
    heads = ["batch", "context", "full depth", "the head", "the rest", *(f"one {kind}" for kind in measured.kinds)]
    _show(f"{measured.model}, {measured.dtype}: milliseconds of a decode step", heads, rows)
    out.print(f"rounds differ by {measured.noise:.1%}; {measured.machine}", markup=False, soft_wrap=True)
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
    from ..latency.planner import Predictor, Workload
    from ..latency.planner import plan as plan_depths
    from ..latency.profile import Profile, shape_of
    from ..latency.resolve import new_schedule
    from ..loading.device import is_here, machine
    from ..loading.load import read_config, refuse_adapter

    targets, measured = o.parse_numbers(speedups), Profile.load(profile)
    style: dict[str, Any] = {**o.style_options(decay=decay, prompt_layers=prompt_layers)}
    if model is not None:
        refuse_adapter(model, "plan, which takes other depths,")
    config = None if model is None else read_config(model)
    if config is not None:
        measured.check(shape=shape_of(config))
    rows: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    notes: list[str] = []
    for size in o.parse_numbers(batch, "--batch", int):
        predictor = Predictor(measured, [Workload(size, prompt_tokens, new_tokens)], clock)
        refused, had = "", {1.0}
        for target in targets:
            start = {"batch_size": size, "asked": target, "asked_of": clock}
            lines.append([str(size), f"{target:g}x {clock}"])
            try:
                schedule = (
                    plan_depths(predictor, target, **style)
                    if config is None
                    else new_schedule(config, target, predictor, **style)
                )
            except ScheduleError as error:
                rows.append(start | {"refused": str(error)})
                lines[-1] += ["cannot be had", *[""] * 6]
                refused = refused or str(error)
                continue
            ratios = {of: round(ratio, 3) for of, ratio in predictor.ratios(schedule).items()}
            seconds = round(predictor.seconds(schedule).job, 4)
            had.add(ratios["layers"])
            start |= {f"{of}_ratio": ratio for of, ratio in ratios.items()}
            rows.append(start | {"job_seconds": seconds, "schedule": schedule.to_dict()})
            lines[-1] += [f"{schedule.max_depth} to {schedule.min_depth}", str(schedule.horizon), str(schedule.deepest)]
            lines[-1] += [*(f"{ratios[of]:.2f}x" for of in ("layers", "step", "job")), f"{seconds:.2f}"]
        if refused:
            notes.append(f"batch {size}: {refused}")
        if max(had) > 1:
            layers = ",".join(f"{ratio:.3g}" for ratio in sorted(had))
            notes.append(f"batch {size}: train a model for these with --speedups {layers}")
    heads = ["batch", "asked", "depths", "over steps", "prompt", "layers", "step", "job", "job s"]
    _show(f"{measured.model}: {prompt_tokens} prompt tokens, {new_tokens} new; of full depth, predicted", heads, lines)
    for note in notes:
        out.print(note, markup=False, soft_wrap=True)
    if measured.warning:
        say(measured.warning)
    here = machine(measured.device if is_here(measured.device) else "cpu")  # plan is for other machines too
    out.print(f"measured on: {measured.machine}", markup=False, soft_wrap=True)
    if here != measured.machine:
        say(f"this is another machine ({here}): what is planned holds there, not here")
    if as_json:
        print(json.dumps({"machine": measured.machine, "model": measured.model, "rows": rows}))


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
) -> None:
    """Time full depth and faster budgets alternately: what was asked for, and what is got, of layers, steps and jobs.

    skipdecode bench --shape opt-1.3b --speedups 1,2,3,5 --batch 1,8,32
    """
    given = locals()
    from ..latency.bench import HEADS, BenchPlan, cells_of
    from ..latency.bench import bench as run
    from ..latency.profile import Profile
    from ..latency.tables import check_folder, save_tables

    measured = Profile.load(profile) if profile else None
    style, sizes = o.style_options(decay=decay, prompt_layers=prompt_layers), o.parse_numbers(batch, "--batch", int)
    targets = o.parse_numbers(speedups)
    plan = BenchPlan(targets, sizes, prompt_tokens, new_tokens, clock, measured, repeats, style)
    if output:
        check_folder(output, "rounds")
    loaded, tokenizer, name, options = _load(given, prompt_tokens + new_tokens, measured)
    if measured is not None and measured.warning:
        say(measured.warning)
    command = f"skipdecode {shlex.join(sys.argv[1:])}"
    with Bar() as bar:
        bar.show("timing alternately", 0, len({1.0, *targets}) * len(sizes) * (repeats + 1))
        rows, about = run(loaded, tokenizer, plan, name, options=options, command=command, on_run=bar.advance)
    cells = [cells_of(row) for row in rows]
    _show(f"{name}: full depth and targets", HEADS, cells)
    for key, value in about.items():
        out.print(f"{key}: {value}", soft_wrap=True, markup=False)
    if output:
        save_tables(output, rows, HEADS, cells, about)
        say(f"wrote {output}")


def _show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table whose lines are not cut to the terminal's width."""
    from ..latency.tables import markdown_table

    out.print(f"{title}\n\n{markdown_table(heads, rows)}\n", soft_wrap=True, markup=False)


def _load(
    given: Mapping[str, Any], tokens: int, measured: Profile | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str, dict[str, Any]]:
    """Load MODEL, or make a model of --shape with random weights, as a command's options (``given``) say.

    Returns:
        The model, its tokenizer, its name, and the loading options, except dtype and device, as a profile stores them.

    Raises:
        UsageError: not just one of MODEL and --shape is given, the model has fewer positions than ``tokens``, or the
            profile in ``measured`` is of something else.
    """
    from ..latency.check_profile import check_profile
    from ..latency.model_shapes import random_model, shape_config
    from ..latency.profiler import check_positions
    from ..loading.load import load, read_config, refuse_adapter
    from ..loading.optimize import optimizations

    model, shape, attention = given["model"], given["shape"], given["attention"]
    if (model is None) == (shape is None):
        raise UsageError("give either MODEL or --shape")
    if model is not None:
        refuse_adapter(model, "the clock, which times other depths,")
    options = optimizations(given["quantization"], given["prepack"]) | ({"attention": attention} if attention else {})
    config = read_config(model) if shape is None else shape_config(shape)
    check_positions(config, tokens)
    if measured is not None:
        random = shape is not None and given["dtype"] == "auto"  # random weights are then bfloat16, wherever they are
        check_profile(measured, config, "bfloat16" if random else given["dtype"], given["device"], **options)
    make: Any = load if shape is None else random_model
    return *make(shape or model, dtype=given["dtype"], device=given["device"], **options), shape or model, options
