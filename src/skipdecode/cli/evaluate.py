"""``skipdecode evaluate`` and ``calibrate``: what a budget costs in quality, and how to make it fit."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ..errors import UsageError
from .console import err, out, parse_speedups, say

if TYPE_CHECKING:
    from ..data.tasks import Example, Task

#: More rows, words or tokens than any job has: what is above is a slip of the finger.
MANY = 10_000_000


def evaluate(
    model: Annotated[str, Argument(help="Directory, hub name or 'demo': the full model, and SkipDecode's checkpoint.")],
    data: Annotated[
        Path, Option(help="Folder with the task's files, a hub name, or a file of rows (prompts are enough).")
    ] = Path("."),
    task: Annotated[str, Option(help="e2e, reddit_tldr, cnn_dm, or jsonl for any data.")] = "jsonl",
    speedups: Annotated[str, Option(help="Target speed-ups.")] = "1,2,3,4,5",
    methods: Annotated[
        str,
        Option(
            help="With commas between: skipdecode, full, multi_exit, calm, unified, d3, hsd, static, scratch. "
            "METHOD=MODEL runs it on a checkpoint of its own; {speedup} in MODEL stands for the budget."
        ),
    ] = "skipdecode",
    output: Annotated[Path, Option(help="Folder for tables, plots, texts and finished rows.")] = Path("evaluation"),
    split: Annotated[str, Option(help="test or validation.")] = "test",
    rows: Annotated[int | None, Option(min=1, max=MANY, help="Score only the first so many inputs.")] = None,
    held_out_rows: Annotated[
        int, Option(min=1, max=MANY, help="Validation inputs for lengths, CALM's threshold and the loss by position.")
    ] = 256,
    words: Annotated[int | None, Option(min=1, max=MANY, help="Summaries: cut a source after so many words.")] = None,
    batch_size: Annotated[int, Option(min=1, max=MANY, help="Rows decoded together.")] = 32,
    max_new_tokens: Annotated[int | None, Option(min=1, max=MANY, help="Default: the task's.")] = None,
    timing_rows: Annotated[int, Option(min=1, max=MANY, help="Inputs that are timed.")] = 64,
    repeats: Annotated[int, Option(min=1, max=1000, help="Rounds timed, the full model and the method in turn.")] = 5,
    samples: Annotated[int, Option(min=1, max=100_000, help="Corpora resampled for the intervals.")] = 1000,
    bert_score: Annotated[str | None, Option(help="Add BERTScore with this encoder: directory or hub name.")] = None,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace rows and tables of other settings or models in OUTPUT.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="The rows as JSON on the last line.")] = False,
) -> None:
    """Quality, achieved layer ratio, wall clock and memory, one row per method and budget, paired with the full model.

    Started again after a kill, it does only the rows that are not there yet.

    skipdecode evaluate demo --task e2e --data e2e-dataset --speedups 1,2,3,4,5
    """
    from ..data.tasks import get_task, subsample
    from ..generation.loading import check_device, read_config

    the_task = get_task(task, max_source_words=words)
    wanted = parse_speedups(speedups)
    if split not in ("test", "validation"):
        raise UsageError(f"--split is test or validation, not {split!r}")
    examples = (_from_file(the_task, data) if data.is_file() else the_task.read(data, split))[:rows]
    if not examples:
        raise UsageError(f"{data} holds no {split} rows")
    held_out = [] if data.is_file() else subsample(the_task.read(data, "validation"), held_out_rows)
    if not held_out or split == "validation":
        say("lengths and thresholds come from the scored rows: there is no other held-out split")
        held_out = held_out or subsample(examples, held_out_rows)

    from ..evaluation.runner import Bench, Evaluation, arms

    selected = arms(methods, model, wanted)
    layers = read_config(selected[0].model).get_text_config(decoder=True).num_hidden_layers
    if max(wanted) > layers:
        raise UsageError(f"--speedups go up to the number of layers, {layers}")
    for arm in selected:
        read_config(arm.model)
    if device:
        check_device(device)
    output.mkdir(parents=True, exist_ok=True)
    scored = all(example.references for example in examples)
    if not scored:
        say("not every row has a reference: texts are compared with the full model's own (agreement)")
        if bert_score:
            raise UsageError("--bert-score compares with references: every row needs one")

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from ..data.metrics import DEFAULT, Agreement, BertScore, Metric
    from ..evaluation.plots import draw_losses, draw_tradeoff
    from ..evaluation.report import FILES, brief, check, notes, save
    from ..evaluation.timing import machine
    from ..files import locked

    metrics: tuple[Metric, ...] = DEFAULT if scored else (Agreement(),)
    metrics += (BertScore(bert_score),) if bert_score else ()
    for metric in metrics:  # a library or an encoder that is missing shows before a model is loaded
        metric.score(["a text"], [["a text"]])
    bench = Bench(
        the_task,
        examples,
        held_out,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens or 0,
        timing_rows=timing_rows,
        repeats=repeats,
        samples=samples,
        metrics=metrics,
        dtype=dtype,
        device=device,
    )
    described = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*described, console=err, transient=True) as progress:
        bar = progress.add_task("evaluate", total=len(selected))
        evaluation = Evaluation(
            bench, output, lambda arm: progress.update(bar, description=arm.key), overwrite=overwrite, say=say
        )
        job = evaluation.job(selected[0], selected[0])
        check(output, job, [(arm.method, arm.speedup) for arm in selected], overwrite)
        evaluation.check(selected)
        results = []
        for row in evaluation.rows(selected):
            results.append(row)
            progress.advance(bar)
    names = [(metric.name, metric.label) for metric in metrics]
    about = {
        "command": shlex.join(["skipdecode", *(_short(part) for part in sys.argv[1:])]),
        "rows": f"{len(examples)} {split} inputs of {task}, greedy, batch {batch_size}",
        "machine": machine(device),
        "rounds": f"{repeats}, the full model and the method in turn",
        "vs full": f"paired bootstrap over inputs, {samples} samples",
    }
    about |= notes(results)
    with locked(output / "table.json", timeout=60):
        check(output, job, [(arm.method, arm.speedup) for arm in selected], overwrite)
        save(results, names, about, output, job)
        draw_tradeoff(results, names, output / "tradeoff.png", about["machine"])
        draw_losses(results, output / "losses.png", about["machine"])
    heads, cells = brief(results, names)
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for line in cells:
        table.add_row(*line)
    out.print(table)
    for name in ("*", "rough"):
        if name in about:
            say(f"{name}: {about[name]}")
    say(f"wrote {', '.join(name for name in FILES if (output / name).exists())} to {output}")
    if as_json:
        print(json.dumps({"about": about, "rows": results}))


def _short(argument: str) -> str:
    """A path outside the working folder says nothing to other people: its last part does."""
    return Path(argument).name if argument.startswith(("/", "..")) else argument


def calibrate(
    model: Annotated[str, Argument(help="Directory, hub name or 'demo'.")],
    data: Annotated[Path, Option(help="Rows like those to come: a file (prompts are enough), or the task's folder.")],
    speedup: Annotated[float, Option(help="Target reduction of layers per decode step.")] = 2.0,
    task: Annotated[str, Option(help="e2e, reddit_tldr, cnn_dm, or jsonl for any data.")] = "jsonl",
    method: Annotated[
        str, Option(help="Whose depths to fit: skipdecode, multi_exit, unified, d3, hsd.")
    ] = "skipdecode",
    rows: Annotated[int, Option(min=1, max=MANY, help="Use so many inputs, evenly drawn.")] = 256,
    words: Annotated[int | None, Option(min=1, max=MANY, help="Summaries: cut a source after so many words.")] = None,
    batch_size: Annotated[
        int, Option(min=1, max=MANY, help="As it will be used: a batch runs until its longest row ends.")
    ] = 32,
    max_new_tokens: Annotated[int | None, Option(min=1, max=MANY, help="Default: the task's.")] = None,
    decay: Annotated[
        str | None,
        Option(help="linear, cosine, exponential, power, step or constant (default: as trained, else linear)."),
    ] = None,
    order: Annotated[
        str | None,
        Option(
            help="top, bottom, even; or search: find it greedily from the loss on the data's responses "
            "(default: as trained, else top)."
        ),
    ] = None,
    search_rows: Annotated[int, Option(min=1, max=MANY, help="Rows that the search computes its losses on.")] = 64,
    output: Annotated[Path, Option(help="The schedule, for --schedule.")] = Path("schedule.json"),
    save: Annotated[
        bool, Option("--save", help="Also into MODEL's config: --speedup K of every verb then takes it.")
    ] = False,
    force: Annotated[bool, Option("--force", help="Save it even where the texts get worse.")] = False,
    device: Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    as_json: Annotated[bool, Option("--json", help="What was found as JSON on the last line.")] = False,
) -> None:
    """Set the horizon from the lengths that MODEL really writes, so that the achieved layer ratio is SPEEDUP.

    What the model was trained with stays: order, decay, warm-up, and the depths if a horizon can be found for them.
    Quality before and after stands beside the ratio.

    skipdecode calibrate demo --task e2e --data e2e-dataset --speedup 5
    """
    from dataclasses import replace

    from ..core import checkpoint_config
    from ..core.fitting import fit, refit
    from ..core.schedule import Schedule, is_schedule
    from ..core.shapes import ORDERS
    from ..data.tasks import get_task, subsample
    from ..files import check_target
    from ..generation.loading import read_config, resolve
    from ..methods import get_method

    the_task = get_task(task, max_source_words=words)
    config = read_config(model)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if not 1 < speedup <= layers:
        raise UsageError(f"--speedup is above 1 and at most the number of layers ({layers}), not {speedup:g}")
    if method not in ("skipdecode", "multi_exit", "unified", "d3", "hsd"):
        raise UsageError(f"{method} has no depths to fit: skipdecode, multi_exit, unified, d3 and hsd have")
    if method != "skipdecode" and (order or decay):
        raise UsageError("--order and --decay are SkipDecode's: the other methods have rules of their own")
    if force and not save:
        raise UsageError("--force goes with --save")
    if save and (model == "demo" or not Path(resolve(model)).is_dir()):
        raise UsageError("--save writes into a local model directory: give one")
    if save and checkpoint_config.trained_method(config) not in ("full", method):
        raise UsageError(
            f"{model} was trained by {checkpoint_config.trained_method(config)}: "
            f"its schedules are not {method}'s to change"
        )
    if order is not None and order not in (*ORDERS, "search"):
        raise UsageError(f"--order is {', '.join(ORDERS)} or search, not {order!r}")
    check_target(output, ours=is_schedule)
    before = checkpoint_config.resolve_schedule(config, speedup)
    known = {k: plan for k, plan in checkpoint_config.schedules_of(config, method).items() if not plan.is_full}
    base, source = known.get(speedup), known.get(speedup) or (known[max(known)] if known else None)
    form: dict[str, Any] = {"order": "bottom" if method == "multi_exit" else "top", "decay": "linear"}
    form |= source.form if source else {}
    form |= {name: value for name, value in {"decay": decay, "order": order}.items() if value not in (None, "search")}
    if method in ("skipdecode", "multi_exit"):
        if source and source.decay == "list" and decay is None:
            raise UsageError(f"{model} was trained with a list of depths, which has no form to fit: give a --decay")
        Schedule(layers, layers, layers, 1, **form)  # contradictions show before the weights are loaded
        if base and ("list" in (base.decay, form["decay"]) or "constant" in {base.decay} ^ {form["decay"]}):
            base = None  # such depths are no use in the form asked for
        base = base and replace(base, **form)
    examples = _inputs(the_task, data, rows)
    if order == "search" and not all(example.references for example in examples):
        raise UsageError("--order search computes its losses on responses: every row needs one")

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..data.metrics import Agreement
    from ..evaluation.calibration import calibrate as run
    from ..evaluation.calibration import fallen, rank_layers, trials
    from ..evaluation.loss import batches_of
    from ..generation.loading import load

    Agreement().score(["a text"], [["a text"]])  # a library that is missing shows before a model is loaded
    network, tokenizer = load(model, device=device)
    found: dict[str, Any] = {}
    described = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*described, console=err) as progress:
        if order == "search":
            bar = progress.add_task("layer order (passes)", total=trials(layers))
            batches = batches_of(subsample(examples, search_rows), tokenizer, network, batch_size)
            ranking = rank_layers(network, batches, on_trial=lambda: progress.advance(bar))
            form["order"] = ranking.order
            base = base and replace(base, order=ranking.order)
            found["losses"] = [round(loss, 4) for loss in ranking.losses]
        bar = progress.add_task("texts (rows)", total=3 * len(examples))
        rule = get_method(method).schedule

        def fitted(lengths: Sequence[int]) -> Schedule:
            if method not in ("skipdecode", "multi_exit"):
                return rule(layers, speedup, lengths)
            return (base and refit(base, speedup, lengths)) or fit(layers, speedup, lengths, **form)

        result = run(
            network,
            tokenizer,
            [example.prompt for example in examples],
            fitted,
            speedup,
            before,
            keep=base is not None and base == before,
            batch_size=batch_size,
            on_batch=lambda cost: progress.advance(bar, cost.rows),
            max_new_tokens=max_new_tokens or the_task.max_new_tokens,
            do_sample=False,
        )
        progress.update(bar, total=progress.tasks[-1].completed)
    plan, after, old = result.schedule, result.after, result.before
    plan.save(output)
    say(f"wrote {output}")
    quality = result.quality([example.references for example in examples])
    found |= {
        "schedule": plan.to_dict(),
        "speedup": speedup,
        "layer_ratio": round(after.layer_ratio, 3),
        "lengths": list(after.lengths),
        "before": {"schedule": before.to_dict(), "layer_ratio": round(old.layer_ratio, 3)},
        "quality": {label: {k: round(v, 2) for k, v in vars(each).items()} for label, each in quality.items()},
    }
    off = after.layer_ratio / speedup - 1
    out.print(
        f"{plan.max_depth} to {plan.min_depth} of {layers} layers over {plan.horizon} tokens, {plan.decay} decay, "
        f"order {plan.order}\nachieved [bold]{after.layer_ratio:.2f}x[/] fewer layers ({off:+.1%}) over "
        f"{len(examples)} texts in batches of {batch_size}, {min(after.lengths)} to {max(after.lengths)} steps each",
        highlight=False,
    )
    _compare(result, quality)
    if base and (plan.max_depth, plan.min_depth) != (base.max_depth, base.min_depth):
        say(
            f"no horizon gives {speedup:g}x over these lengths with the {base.max_depth} to {base.min_depth} layers "
            f"that were trained: the depths moved to {plan.max_depth} to {plan.min_depth}"
        )
    if abs(off) > 0.03:
        say(f"{method} comes no nearer to {speedup:g}x with {layers} layers")
    if as_json:
        print(json.dumps(found))
    worse = fallen(quality)
    if save and worse and not force:
        falls = ", ".join(f"{label} falls from {each.before:.2f} to {each.after:.2f}" for label, each in worse.items())
        raise UsageError(
            f"{falls} ({old.layer_ratio:.2f}x before, {after.layer_ratio:.2f}x after): {model} stays as it was. "
            f"Train with --schedule {output}, or give --force to save it all the same"
        )
    if save:
        checkpoint_config.save_calibrated(Path(resolve(model)), speedup, plan, method)
        say(f"wrote the schedule for {speedup:g}x into {Path(resolve(model)) / 'config.json'}")


def _compare(result: Any, quality: Mapping[str, Any]) -> None:
    """Full depth, the schedule there was and the fitted one, side by side."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(("", "full depth", "before", "after")):
        table.add_column(head, justify="right" if number else "left")
    table.add_row("fewer layers", *(f"{each.layer_ratio:.2f}x" for each in (result.full, result.before, result.after)))
    for label, each in quality.items():
        table.add_row(label, *(f"{value:.2f}" for value in (each.full, each.before, each.after)))
    out.print(table)


def _inputs(task: Task, data: Path, count: int | None, split: str = "validation") -> list[Example]:
    """``count`` rows evenly drawn from a file (prompts are enough), or from the split of the task's folder.

    Raises UsageError if there are none.
    """
    from ..data.tasks import subsample

    examples = _from_file(task, data) if data.is_file() else task.read(data, split) or task.read(data, "train")
    if not examples:
        raise UsageError(f"{data} holds no rows")
    return subsample(examples, count or len(examples))


def _from_file(task: Task, path: Path) -> list[Example]:
    """Rows of a file as ``generate`` reads them: bad ones are named, references are taken where there are some."""
    from ..data.inputs import read_items
    from ..data.tasks import Example

    items = read_items(str(path), task)
    for item in items:
        if item.error:
            say(f"{path}, line {item.line}: {item.error}")
    return [Example(item.prompt, tuple(item.references)) for item in items if not item.error]
