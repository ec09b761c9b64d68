"""``skipdecode generate``: generate a text for every prompt of an input."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit

from ..errors import FileError, UsageError
from . import options as o
from .console import Bar, drop_output, err, say

if TYPE_CHECKING:
    from ..generation.job import GenerationJob, JobResult

#: Options that ``model.generate`` takes under the same names.
DECODING = (
    "max_new_tokens min_new_tokens do_sample temperature top_p top_k num_beams repetition_penalty no_repeat_ngram_size"
).split()
#: Options that :class:`GenerationJob` takes under the same names.
JOB = (
    "format adapter schedule prompt_layers clock profile seed dtype device revision quantization prepack overwrite chat"
).split()


def generate(
    model: o.Model,
    input: o.Input = "-",
    prompt: o.Prompts = None,
    output: o.Output = "-",
    adapter: o.Adapter = None,
    speedup: o.Speedup = None,
    schedule: o.ScheduleFile = None,
    full: o.Full = False,
    prompt_layers: o.PromptLayers = None,
    clock: o.Clock = "layers",
    profile: o.ProfileFile = None,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    task: o.Task = "jsonl",
    format: o.Format = None,
    prompt_column: o.PromptColumn = None,
    response_column: o.ResponseColumn = None,
    prompt_share: o.PromptShare = None,
    chat: o.Chat = False,
    do_sample: o.DoSample = False,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    seed: o.SamplingSeed = 0,
    num_beams: o.NumBeams = None,
    min_new_tokens: o.MinNewTokens = None,
    repetition_penalty: o.RepetitionPenalty = None,
    no_repeat_ngram_size: o.NoRepeatNgramSize = None,
    stop: o.Stop = None,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    revision: o.Revision = None,
    offload: o.OffloadTo = None,
    max_memory: o.MaxMemory = None,
    offload_folder: o.OffloadFolder = None,
    quantization: o.Quantization = None,
    prepack: o.Prepack = False,
    engine: o.EngineName = "transformers",
    ray: o.RayWorkers = None,
    overwrite: o.Overwrite = False,
    as_json: o.Json = False,
) -> None:
    """Write a text for every row of the input. After an interruption, the same command writes only the rest.

    skipdecode generate demo --task e2e --input testset_w_refs.csv --output texts.jsonl --speedup 5
    """
    job = _job(locals())
    with Bar() as bar:
        result = job.run(
            on_start=lambda total, done: bar.show("generate", done, total),
            on_batch=lambda cost: bar.advance(cost.rows, f"{cost.tokens / cost.seconds:,.0f} tokens/s"),
            say=say,
        )
    if job.output is None:
        try:
            sys.stdout.write("".join(f"{text}\n" for text in result.texts) if prompt else result.jsonl)
            sys.stdout.flush()
        except OSError as error:  # typer says nothing of a reader that has gone
            drop_output()
            raise FileError(f"the texts could not be written ({error.strerror}): give --output FILE") from None
    _show(result, as_json)
    if not result.summary["rows"]:
        raise Exit(1)


def _job(given: Mapping[str, Any]) -> GenerationJob:
    """Return the job that the command's options describe. Raises SkipDecodeError if they contradict each other."""
    from ..data.tasks import task_from
    from ..generation.engines import get_engine
    from ..generation.job import GenerationJob

    output, stop = given["output"], given["stop"]
    if given["prompt"] and given["input"] != "-":
        raise UsageError("give one of --prompt and --input")
    if output == "-" and sys.stdout is None:
        raise UsageError("standard output is closed: give --output FILE")
    offload = None
    if given["offload"] or given["max_memory"] is not None:
        from ..loading.offload import Offload

        offload = Offload(given["offload"] or "auto", given["max_memory"], given["offload_folder"])
    elif given["offload_folder"]:
        raise UsageError("--offload-folder goes with --offload or --max-memory")
    engine = get_engine(given["engine"])
    if given["ray"]:
        from ..generation.ray import RayEngine

        engine = RayEngine(engine, given["ray"])
    decoding = {name: given[name] for name in DECODING if given[name] is not None and given[name] is not False}
    return GenerationJob(
        given["model"],
        given["prompt"] or given["input"],
        None if output == "-" else Path(output),
        task=task_from(given),
        batch_size=given["batch_size"],
        offload=offload,
        engine=engine,
        options=decoding | ({"stop_strings": stop} if stop else {}),
        speedup=1 if given["full"] else given["speedup"],
        **{name: given[name] for name in JOB},
    )


def _show(result: JobResult, as_json: bool) -> None:
    """Print the bad input lines, and a summary of the job."""
    for item in result.items:
        if item.error:
            err.print(f"line {item.line}: {item.error}", style="yellow", markup=False)
    figures = _figures(result.summary)
    width = max(len(figure) for figure, _ in figures)
    for figure, label in figures:
        err.print(f"[bold]{figure:>{width}}[/] {label}")
    if as_json:
        print(json.dumps(result.summary))
    if not result.summary["rows"]:
        say("no row could be generated")


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    target = f"{summary['target_speedup']:g}x" + (
        "" if summary["target_of"] == "layers" else f" of a {summary['target_of']}"
    )
    decoding = f", {summary['decode_seconds']:.1f} of them decoding" if "decode_seconds" in summary else ""
    figures = [
        (f"{summary['rows']:,}", f"rows written, {summary['bad_rows']} bad"),
        (f"{summary['tokens']:,}", "tokens"),
        (f"{summary['tokens_per_second']:,.0f}", "tokens/s, prompts included"),
        (f"{summary['seconds']:.1f}", f"seconds{decoding}"),
        (f"{summary['average_depth']:.2f}", f"layers of {summary['layers']} per decode step"),
        (f"{summary['layer_ratio']:.2f}x", f"layer reduction of a step (target {target})"),
    ]
    if "peak_kv_bytes" in summary:
        figures.append((f"{summary['peak_kv_bytes'] / 1e6:.1f}", "MB of keys and values at most"))
    return figures
