"""``skipdecode generate``: the main job."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from ..errors import FileError, UsageError
from .console import drop_output, err, say

if TYPE_CHECKING:
    from ..core.schedule import Schedule
    from ..data.inputs import Item
    from ..generation.generate import Completion, Cost
    from ..generation.jobs import Journal


#: More tokens, rows in a batch or words than anybody means: a slip that would run for ever or fill the memory.
MOST = 1_000_000


def generate(
    model: Annotated[str, Argument(help="Directory, hub name, or 'demo' for the embedded checkpoint.")],
    input: Annotated[
        str, Option(help="JSONL or CSV with a prompt column, lines of text, or - for standard input.")
    ] = "-",
    output: Annotated[str, Option(help="JSONL, in the input's order; - for standard output.")] = "-",
    task: Annotated[
        str,
        Option(help="e2e, reddit_tldr and cnn_dm apply their prompt format; jsonl takes prompts as they are."),
    ] = "jsonl",
    words: Annotated[int | None, Option(min=1, max=MOST, help="Summaries: cut a source after so many words.")] = None,
    speedup: Annotated[
        float | None, Option(help="How many times fewer layers to aim at (default: the checkpoint's schedule, else 2).")
    ] = None,
    schedule: Annotated[Path | None, Option(help="A schedule's JSON file instead.")] = None,
    full: Annotated[bool, Option("--full", help="The unmodified model.")] = False,
    format: Annotated[str | None, Option(help="jsonl, csv or text, if the input's name does not tell.")] = None,
    batch_size: Annotated[int, Option(min=1, max=MOST, help="Rows decoded together.")] = 32,
    max_new_tokens: Annotated[
        int | None, Option(min=1, max=MOST, help="Default: the task's (e2e 80, jsonl 128).")
    ] = None,
    min_new_tokens: Annotated[int | None, Option(min=0, max=MOST)] = None,
    do_sample: Annotated[bool, Option("--do-sample", help="Sample instead of taking the likeliest token.")] = False,
    temperature: Annotated[float | None, Option(min=0.001, max=1000)] = None,
    top_p: Annotated[float | None, Option(min=1e-6, max=1)] = None,
    top_k: Annotated[int | None, Option(min=0, max=MOST)] = None,
    num_beams: Annotated[int | None, Option(min=1, max=1000)] = None,
    length_penalty: Annotated[float | None, Option(min=-10, max=10)] = None,
    repetition_penalty: Annotated[float | None, Option(min=0.001, max=1000)] = None,
    no_repeat_ngram_size: Annotated[int | None, Option(min=0, max=MOST)] = None,
    seed: Annotated[int, Option(min=0, help="For sampling.")] = 0,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace an output, finished or not, that is already there.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="The summary as JSON on the last line of standard output.")] = False,
) -> None:
    """Write a text for every row of the input. Started again after a kill, it does only the rest.

    skipdecode generate demo --task e2e --input testset_w_refs.csv --output texts.jsonl --speedup 5
    """
    from ..core.checkpoint_config import resolve_schedule, trained_method
    from ..core.schedule import Schedule
    from ..data.inputs import read_items
    from ..data.tasks import get_task
    from ..generation.loading import placement, read_config, resolve

    if sum((speedup is not None, schedule is not None, full)) > 1:
        raise UsageError("give one of --speedup, --schedule and --full")
    the_task = get_task(task, max_source_words=words)
    # All of this is checked before the weights are loaded.
    config = read_config(model)
    plan = None if full else resolve_schedule(config, speedup, Schedule.load(schedule) if schedule else None)
    if plan is not None and trained_method(config) == "full":
        say(f"{model} was not trained for skipping: its texts will be poor (skipdecode train; or --full)")
    items = read_items(input, the_task, format)
    names = {
        "max_new_tokens": max_new_tokens or the_task.max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
    }
    options: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    if not do_sample and {"temperature", "top_p", "top_k"} & set(options):
        raise UsageError("--temperature, --top-p and --top-k go with --do-sample")
    if length_penalty is not None and (num_beams or 1) == 1:
        raise UsageError("--length-penalty goes with --num-beams")
    if min_new_tokens and min_new_tokens > options["max_new_tokens"]:
        raise UsageError(f"--min-new-tokens {min_new_tokens} is more than --max-new-tokens {options['max_new_tokens']}")
    # Another type or kind of device rounds otherwise; a hub name alone does not say which version it is.
    placed = [*map(str, placement(config, dtype, device)), getattr(config, "_commit_hash", None)]

    from ..files import check_target, is_stream
    from ..generation import jobs
    from ..generation.generate import Cost
    from ..provenance import fingerprint, identity

    layers = config.get_text_config(decoder=True).num_hidden_layers
    target = Path(output)
    to_file = output != "-" and not is_stream(target)
    if to_file:
        check_target(target)
        _refuse_input(input, target)
    elif output == "-" and sys.stdout is None:
        raise UsageError("standard output is closed: give --output FILE")

    def work(journal: jobs.Journal | None) -> tuple[str, dict[str, Any]]:
        """The texts as JSONL, and what they cost and scored."""
        rows: dict[int, Completion] = {}
        cost = Cost(layers)
        if any(item.error is None for item in items):
            rows, cost = _rows(items, model, plan, dtype, device, journal, batch_size=batch_size, seed=seed, **options)
        summary = cost.summary() | {
            "bad_rows": sum(item.error is not None for item in items),
            "target_speedup": 1.0 if plan is None else speedup or plan.target,
        }
        scored = [i for i, item in enumerate(items) if item.references and item.error is None]
        if scored:
            summary |= _score(the_task, [rows[i].text for i in scored], [items[i].references for i in scored])
        return "".join(f"{line}\n" for line in jobs.lines(items, rows)), summary

    if to_file:
        prompts = [item.prompt for item in items]
        parts = (prompts, plan.to_dict() if plan else None, options, seed, placed, batch_size)
        with jobs.Journal(target, fingerprint(identity(resolve(model)), *parts), replace=overwrite) as journal:
            if journal.summary is not None:  # killed between its last two writes
                summary = journal.summary
                journal.drop()
            elif target.exists() and not overwrite:
                raise UsageError(f"{output} is already there: give --overwrite to replace it")
            else:
                text, summary = work(journal)
                journal.finish(text, summary)
    else:
        text, summary = work(None)
        _write_stream(output, text)
    for item in items:
        if item.error:
            err.print(f"line {item.line}: {item.error}", style="yellow", markup=False)
    _show(summary, layers)
    if as_json:
        print(json.dumps(summary))
    if not summary["rows"]:
        say("no row could be generated")
        raise Exit(1)


def _rows(
    items: list[Item],
    model: str,
    plan: Schedule | None,
    dtype: str,
    device: str | None,
    journal: Journal | None,
    **options: Any,
) -> tuple[dict[int, Completion], Cost]:
    """The rows that are not bad, those of the journal included, and their cost."""
    from ..generation import jobs
    from ..generation.loading import load

    network, tokenizer = load(model, dtype=dtype, device=device)
    done = len(journal.rows) if journal else 0
    if done:
        say(f"{done} rows were done before")
    with _bar(sum(item.error is None for item in items), done) as progress:
        return jobs.run_job(items, network, tokenizer, plan, journal=journal, on_batch=progress, **options)


def _refuse_input(source: str, target: Path) -> None:
    """Neither the output nor its journal may be the file that is read."""
    real = Path(os.path.realpath(target))
    for path in (real, real.with_name(real.name + ".partial")):
        if source != "-" and path.exists() and os.path.exists(source) and path.samefile(source):
            raise UsageError(f"{path} is the input: give another --output")


def _write_stream(output: str, text: str) -> None:
    """To standard output, a pipe or a device; a reader that has gone must not lose the texts without a word."""
    from ..files import write

    try:
        if output == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write(output, text)
    except OSError as error:
        drop_output()
        raise FileError(f"the texts could not be written ({error.strerror}): give --output FILE to keep them") from None


@contextmanager
def _bar(total: int, done: int) -> Iterator[Any]:
    """A progress bar in rows and tokens per second; yields what to call with each batch's cost."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        row = progress.add_task("generate", total=total, completed=done, rate="")
        so_far = {"tokens": 0, "seconds": 0.0}

        def advance(cost: Any) -> None:
            so_far["tokens"] += cost.tokens
            so_far["seconds"] += cost.seconds
            rate = so_far["tokens"] / so_far["seconds"]
            progress.update(row, advance=cost.rows, rate=f"{rate:,.0f} tokens/s")

        yield advance
        # Rows found too long on the way were counted in.
        progress.update(row, total=progress.tasks[0].completed)


def _score(task: Any, texts: list[str], references: list[list[str]]) -> dict[str, float]:
    """The task's score where the input carries references and its library is installed."""
    try:
        return {name: round(value, 2) for name, value in task.score(texts, references).items()}
    except ImportError:
        say("the input has references; install skipdecode[eval] to see the score")
        return {}


def _show(summary: dict[str, Any], layers: int) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", style="bold")
    table.add_column()
    table.add_row(f"{summary['rows']:,}", f"rows, and {summary['bad_rows']} bad ones")
    table.add_row(f"{summary['tokens']:,}", "tokens")
    table.add_row(f"{summary['tokens_per_second']:,.0f}", "tokens/s")
    table.add_row(f"{summary['seconds']:.1f}", f"seconds, {summary['decode_seconds']:.1f} of them decoding")
    table.add_row(f"{summary['average_depth']:.2f}", f"layers of {layers} per decode step")
    table.add_row(f"{summary['layer_ratio']:.2f}x", f"fewer layers (target {summary['target_speedup']:g}x)")
    table.add_row(f"{summary['peak_kv_bytes'] / 1e6:.1f}", "MB of keys and values at most")
    for name, label in (("bleu", "BLEU"), ("rouge_l", "ROUGE-L")):
        if name in summary:
            table.add_row(f"{summary[name]:.2f}", label)
    err.print(table)
