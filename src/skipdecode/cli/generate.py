"""``skipdecode generate``: an output for every prompt of a file."""

import json
from pathlib import Path
from typing import Annotated

from typer import Context, Exit, Option

from ..errors import UsageError
from . import options as o
from .console import Bar, err, say

#: Options that ``model.generate`` takes under the same names.
DECODING = ("max_new_tokens", "do_sample", "temperature", "top_p", "num_beams", "repetition_penalty")


def generate(
    context: Context,
    model: o.Model,
    prompts: o.Prompts = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt; may be repeated. Prints the texts alone.")] = None,
    output: Annotated[Path | None, Option(help="JSONL file, in the prompts' order; default: standard output.")] = None,
    task: o.Task = "jsonl",
    adapter: o.Adapter = None,
    speedup: o.Speedup = None,
    schedule: Annotated[Path | None, Option(help="JSON file of a schedule, instead of a speed.")] = None,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    do_sample: o.DoSample = False,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    seed: o.Seed = 0,
    num_beams: Annotated[int | None, Option(min=1, help="Beams of beam search; 1 is none.")] = None,
    repetition_penalty: o.RepetitionPenalty = None,
    stop: Annotated[
        list[str] | None, Option(help="String that ends an output, \\n a line break; may be repeated.")
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    quantization: o.Quantization = None,
    offload: Annotated[str | None, Option(help="Keep layers on the disk or in host memory: disk, cpu, auto.")] = None,
    engine: o.Engine = "transformers",
    ray: Annotated[int | None, Option(min=1, help="Workers on a Ray cluster, or on this machine.")] = None,
    overwrite: o.Overwrite = False,
    as_json: o.Json = False,
) -> None:
    """Generate an output for every prompt. After an interruption, the same command generates the rest.

    skipdecode generate fast --prompts prompts.jsonl --output outputs.jsonl --speedup 2
    """
    from ..data.tasks import get_task
    from ..generation.job import GenerationJob
    from ..loading.load import Checkpoint
    from ..schedule import Schedule

    values = context.params
    if (prompts is None) == (not prompt):
        raise UsageError("give one of --prompts FILE and --prompt TEXT")
    decoding = {name: values[name] for name in DECODING if values[name] is not None}
    if not do_sample and (temperature is not None or top_p is not None):
        raise UsageError("--temperature and --top-p need --do-sample: without it, decoding is greedy")
    if stop:
        decoding["stop_strings"] = [text.replace("\\n", "\n").replace("\\t", "\t") for text in stop]
    chosen = get_task(task)
    texts = [chosen.example({chosen.text_column: text}).prompt for text in prompt or ()]
    job = GenerationJob(
        Checkpoint.resolve(model, adapter),
        texts or prompts or (),
        output,
        task=chosen,
        speedup=speedup,
        schedule=Schedule.load(schedule) if schedule else None,
        batch_size=batch_size,
        seed=seed,
        options=decoding,
        load={name: values[name] for name in ("dtype", "device", "quantization", "offload")},
        engine=engine,
        workers=ray or 0,
        overwrite=overwrite,
    )
    with Bar() as bar:
        result = job.run(
            on_start=lambda total, done: bar.show("generate", done, total),
            on_batch=lambda stats: bar.advance(stats.rows, f"{stats.tokens_per_second:,.0f} tokens/s"),
            say=say,
        )
    if output is None:
        print("".join(f"{text}\n" for text in result.texts) if prompt else result.jsonl, end="", flush=True)
    for number, row in enumerate(result.rows, 1):
        if "error" in row:
            err.print(f"row {number}: {row['error']}", style="yellow", markup=False)
    summary = result.summary
    figures = [
        (f"{summary['rows']:,}", f"sequences, {summary['bad_rows']} bad rows"),
        (f"{summary['tokens']:,}", "tokens"),
        (f"{summary['tokens_per_second']:,.0f}", "tokens/s, prompts included"),
        (f"{summary['seconds']:.1f}", "seconds"),
        (f"{summary['average_depth']:.2f}", f"layers of {summary['layers']} per decode step"),
        (f"{summary['layer_ratio']:.2f}x", "fewer layers"),
    ]
    for name, label in (("kv", "KV cache"), ("memory", "GPU memory, weights aside,")):
        if peak := summary.get(f"peak_{name}_bytes"):
            figures.append((f"{peak / 1e6:.1f}", f"MB of {label} at most"))
    width = max(len(figure) for figure, _ in figures)
    for figure, label in figures:
        err.print(f"[bold]{figure:>{width}}[/] {label}")
    if as_json:
        print(json.dumps(summary))
    if not summary["rows"]:
        raise Exit(1)
