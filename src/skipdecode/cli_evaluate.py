"""``skipdecode evaluate`` and ``calibrate``: what a budget costs in quality, and how to make it fit."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from .console import budgets, err, out, say
from .errors import UsageError


def evaluate(
    model: Annotated[str, Argument(help="Directory, hub name or 'demo': the full model, and SkipDecode's checkpoint.")],
    data: Annotated[Path, Option(help="Folder with the task's files, or a hub name.")] = Path("."),
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
    rows: Annotated[int | None, Option(min=1, help="Score only the first so many inputs.")] = None,
    held_out_rows: Annotated[
        int, Option(min=1, help="Validation inputs for lengths, CALM's threshold and the loss by position.")
    ] = 256,
    words: Annotated[int | None, Option(min=1, help="Summaries: cut a source after so many words.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Rows decoded together.")] = 32,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Default: the task's.")] = None,
    timing_rows: Annotated[int, Option(min=1, help="Inputs that are timed.")] = 64,
    repeats: Annotated[int, Option(min=1, help="Rounds timed, the full model and the method in turn.")] = 5,
    samples: Annotated[int, Option(min=1, help="Corpora resampled for the intervals.")] = 1000,
    bert_score: Annotated[str | None, Option(help="Add BERTScore with this encoder: directory or hub name.")] = None,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    as_json: Annotated[bool, Option("--json", help="The rows as JSON on the last line.")] = False,
) -> None:
    """Quality, achieved layer ratio, wall clock and memory, one row per method and budget, paired with the full model.

    Started again after a kill, it does only the rows that are not there yet.

    skipdecode evaluate demo --task e2e --data e2e-dataset --speedups 1,2,3,4,5
    """
    from .loading import check_device, read_config
    from .tasks import evenly, get_task

    the_task = get_task(task, words)
    wanted = budgets(speedups)
    if split not in ("test", "validation"):
        raise UsageError(f"--split is test or validation, not {split!r}")
    examples = the_task.read(data, split)[:rows]
    if not examples:
        raise UsageError(f"{data} holds no {split} rows")
    held_out = evenly(the_task.read(data, "validation"), held_out_rows)
    if not held_out or split == "validation":
        say("lengths and thresholds come from the scored rows: there is no other held-out split")
        held_out = held_out or evenly(examples, held_out_rows)

    from .evaluation import Bench, Evaluation, arms

    selected = arms(methods, model, wanted)
    layers = read_config(selected[0].model).get_text_config(decoder=True).num_hidden_layers
    if max(wanted) > layers:
        raise UsageError(f"--speedups go up to the number of layers, {layers}")
    for arm in selected:
        read_config(arm.model)
    if device:
        check_device(device)
    output.mkdir(parents=True, exist_ok=True)

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from .benchmark import machine
    from .metrics import DEFAULT, BertScore
    from .plots import draw_losses, draw_tradeoff
    from .report import brief, save

    metrics = (*DEFAULT, BertScore(bert_score)) if bert_score else DEFAULT
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
        evaluation = Evaluation(bench, output, lambda arm: progress.update(bar, description=arm.key))
        results = []
        for row in evaluation.rows(selected):
            results.append(row)
            progress.advance(bar)
    names = [(metric.name, metric.label) for metric in metrics]
    about = {
        "command": shlex.join(["skipdecode", *(_short(part) for part in sys.argv[1:])]),
        "rows": f"{len(examples)} {split} inputs of {task}, greedy, batch {batch_size}",
        "machine": machine(device),
        "clock": f"medians of {repeats} rounds over {min(timing_rows, len(examples))} inputs, "
        "each method alternating with the full model",
        "vs full": f"paired bootstrap over inputs, {samples} samples",
    }
    save(results, names, about, output)
    draw_tradeoff(results, names, output / "tradeoff.png", about["machine"])
    draw_losses(results, output / "losses.png", about["machine"])
    heads, cells = brief(results, names)
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for line in cells:
        table.add_row(*line)
    out.print(table)
    say(f"wrote table.md, table.csv, table.json, tradeoff.png and losses.png to {output}")
    if as_json:
        print(json.dumps({"about": about, "rows": results}))


def _short(argument: str) -> str:
    """A path outside the working folder says nothing to other people: its last part does."""
    return Path(argument).name if argument.startswith(("/", "..")) else argument


def calibrate(
    model: Annotated[str, Argument(help="Directory, hub name or 'demo'.")],
    data: Annotated[Path, Option(help="Rows like those to come: a file, or the task's folder.")],
    speedup: Annotated[float, Option(help="How many times fewer layers decode steps shall run.")] = 2.0,
    task: Annotated[str, Option(help="e2e, reddit_tldr, cnn_dm, or jsonl for any data.")] = "jsonl",
    method: Annotated[
        str, Option(help="Whose depths to fit: skipdecode, multi_exit, unified, d3, hsd.")
    ] = "skipdecode",
    rows: Annotated[int, Option(min=1, help="Use so many inputs, evenly drawn.")] = 256,
    words: Annotated[int | None, Option(min=1, help="Summaries: cut a source after so many words.")] = None,
    batch_size: Annotated[int, Option(min=1, help="As it will be used: a batch runs until its longest row ends.")] = 32,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Default: the task's.")] = None,
    decay: Annotated[str, Option(help="linear, cosine, exponential, power, step or constant.")] = "linear",
    order: Annotated[
        str, Option(help="top, bottom, even; or search: find it greedily from the loss on the data's responses.")
    ] = "top",
    search_rows: Annotated[int, Option(min=1, help="Rows that the search computes its losses on.")] = 64,
    output: Annotated[Path, Option(help="The schedule, for --schedule.")] = Path("schedule.json"),
    save: Annotated[
        bool, Option("--save", help="Also into MODEL's config: --speedup K of every verb then takes it.")
    ] = False,
    device: Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    as_json: Annotated[bool, Option("--json", help="What was found as JSON on the last line.")] = False,
) -> None:
    """Set horizon and depths from the lengths that MODEL really writes, so that the achieved layer ratio is SPEEDUP.

    skipdecode calibrate demo --task e2e --data e2e-dataset --speedup 5
    """
    from . import trained
    from .fitting import fit
    from .loading import read_config, resolve
    from .methods import get_method
    from .order import ORDERS
    from .tasks import evenly, get_task

    the_task = get_task(task, words)
    config = read_config(model)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if not 1 < speedup <= layers:
        raise UsageError(f"--speedup is above 1 and at most the number of layers ({layers}), not {speedup:g}")
    if method != "skipdecode" and (order, decay) != ("top", "linear"):
        raise UsageError("--order and --decay are SkipDecode's: the other methods have rules of their own")
    if method not in ("skipdecode", "multi_exit", "unified", "d3", "hsd"):
        raise UsageError(f"{method} has no depths to fit: skipdecode, multi_exit, unified, d3 and hsd have")
    if save and (model == "demo" or not Path(resolve(model)).is_dir()):
        raise UsageError("--save writes into a local model directory: give one")
    if save and trained.method(config) not in ("full", method):
        raise UsageError(f"{model} was trained by {trained.method(config)}: its schedules are not {method}'s to change")
    if order not in (*ORDERS, "search"):
        raise UsageError(f"--order is {', '.join(ORDERS)} or search, not {order!r}")
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    examples = evenly(the_task.read(data, "validation") or the_task.read(data, "train"), rows)
    if not examples:
        raise UsageError(f"{data} holds no rows")
    fit(layers, speedup, [32], decay=decay)  # what the options contradict shows before the weights are loaded

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from .calibration import calibrate as run
    from .calibration import rank_layers, trials
    from .loading import load
    from .losses import batches_of

    network, tokenizer = load(model, device=device)
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"decay": decay, "order": order}
    described = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*described, console=err) as progress:
        if order == "search":
            bar = progress.add_task("layer order (passes)", total=trials(layers))
            batches = batches_of(evenly(examples, search_rows), tokenizer, network, batch_size)
            ranking = rank_layers(network, batches, on_trial=lambda: progress.advance(bar))
            options["order"] = ranking.order
            found["losses"] = [round(loss, 4) for loss in ranking.losses]
        bar = progress.add_task("lengths (rows)", total=2 * len(examples))
        rule = partial(get_method(method).schedule, layers, speedup)
        result = run(
            network,
            tokenizer,
            [example.prompt for example in examples],
            rule if method != "skipdecode" else partial(fit, layers, speedup, **options),
            speedup,
            batch_size=batch_size,
            on_batch=lambda cost: progress.advance(bar, cost.rows),
            max_new_tokens=max_new_tokens or the_task.max_new_tokens,
            do_sample=False,
        )
        progress.update(bar, total=progress.tasks[-1].completed)
    plan = result.schedule
    plan.save(output)
    say(f"wrote {output}")
    if save:
        known = trained.schedules(network.config) | {float(speedup): plan}
        path = Path(resolve(model)) / "config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        values[trained.CONFIG_KEY] = trained.entry(known, method)
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        say(f"wrote the schedule for {speedup:g}x into {path}")
    found |= {
        "schedule": plan.to_dict(),
        "speedup": speedup,
        "layer_ratio": round(result.layer_ratio, 3),
        "lengths": list(result.lengths),
    }
    off = result.layer_ratio / speedup - 1
    out.print(
        f"{plan.max_depth} to {plan.min_depth} of {layers} layers over {plan.horizon} tokens, order {plan.order}\n"
        f"achieved [bold]{result.layer_ratio:.2f}x[/] fewer layers ({off:+.1%}) over {len(examples)} texts in batches "
        f"of {batch_size}, {min(result.lengths)} to {max(result.lengths)} steps each",
        highlight=False,
    )
    if abs(off) > 0.03:
        say(f"{method} comes no nearer to {speedup:g}x with {layers} layers")
    if as_json:
        print(json.dumps(found))
