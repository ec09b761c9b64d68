"""Quality against tokens per second: one model at several speeds, and what people would take instead.

    benchmarks/peers/environments.sh llamacpp
    python benchmarks/frontier.py MODEL ADAPTER [ADAPTER …] --gguf FILE --pruned "pruned, 2x=FOLDER" --output FOLDER

Run it alone on the machine. Every way has a process of its own, stopped while another is timed, and is asked in turn:
row by row with the prompts as they are, then with batches of equal prompts. Ends of texts are suppressed, so that all
ways write equally much. What they wrote is judged by MODEL at full depth in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skipdecode
from peers.catalogue import Engine
from peers.engines.skipdecode import Ids
from peers.processes import EngineFailed, Running
from skipdecode import Schedule
from skipdecode.data.collator import Collator
from skipdecode.data.inputs import read_items
from skipdecode.data.metrics import Agreement, Repetition
from skipdecode.data.tasks import get_task
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import UsageError
from skipdecode.evaluation.loss import response_loss
from skipdecode.files import write
from skipdecode.generation.generate import generate_ids
from skipdecode.loading.device import machine
from skipdecode.loading.load import read_generation_config
from skipdecode.model.adapter import read_schedules

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
#: The first way: every other one is compared with it.
BASELINE = "full depth, bfloat16"
#: Names of processes that no other way may have.
TAKEN = ("bfloat16", "int8", "lookup", "llamacpp")


@dataclass(frozen=True)
class Way:
    """One line of the table.

    Attributes:
        process: the ways with the same one share a loaded model.
        engine: the program, with options.
        call: options of each call.
        alone: it takes one row at a time.
    """

    process: str
    engine: Engine
    call: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False


def ways(args: argparse.Namespace) -> dict[str, Way]:
    """All ways that the arguments give files for."""
    found: dict[str, Way] = {}
    for kind in ("bfloat16", "int8"):
        for number, adapter in enumerate(args.adapters if kind not in args.without else ()):
            options = {"adapter": str(adapter)} | ({"quantization": "int8"} if kind == "int8" else {})
            engine, process = Engine("skipdecode", options=options), f"{kind}{number or ''}"
            if not number:
                found[f"full depth, {kind}"] = Way(process, engine)
            for speedup, schedule in read_schedules(adapter).items():
                found.setdefault(f"{speedup:g}x, {kind}", Way(process, engine, {"schedule": schedule.to_dict()}))
    names = [name for name, _ in args.pruned]
    if taken := {each for each in names if names.count(each) > 1 or each in TAKEN}:
        raise UsageError(f"{', '.join(taken)}: --pruned needs names of its own")
    for name, checkpoint in args.pruned:
        found[name] = Way(name, Engine("skipdecode", options={"checkpoint": checkpoint}))
    lookup = Engine("transformers", options={"prompt_lookup": 10})
    found["prompt lookup, bfloat16"] = Way("lookup", lookup, alone=True)
    if args.gguf:
        llama: dict[str, Any] = {"gguf": str(args.gguf.resolve()), "forbidden": args.ends}
        found["llama.cpp, the GGUF file"] = Way("llamacpp", Engine("llamacpp", "llamacpp", "GGUF", llama))
    return found


def main() -> None:
    """Time, judge, and write the figures and the plot."""
    args = _parser().parse_args()
    ends = read_generation_config(str(args.model)).eos_token_id
    args.ends = ends if isinstance(ends, list) else [ends]
    known = ways(args)
    model, tokenizer = skipdecode.load(str(args.model), dtype="float32", device="cpu")
    items = [item for item in read_items(str(args.prompts), get_task("jsonl")) if item.error is None]
    prompts = encode_prompts(tokenizer, [item.prompt for item in items[: args.limit]])
    reference = written(model, tokenizer, prompts, args.new_tokens)
    # Rows of one length: each prompt goes on with what full depth writes.
    equal = [(prompt + text)[: args.prompt_tokens] for prompt, text in zip(prompts, reference, strict=True)]
    if {*map(len, equal)} != {args.prompt_tokens}:
        raise UsageError("a prompt and full depth's text are shorter than --prompt-tokens: give more --new-tokens")
    clock = timed(known, prompts, equal, args)
    rows_of_table = []
    for name in [name for name in known if len(clock.texts.get(name, ())) == len(prompts)]:
        row: dict[str, Any] = {"way": name, "peak_rss": clock.memory[name], "failed": clock.failed.get(name)}
        row |= judged(model, tokenizer, prompts, clock.texts[name], reference)
        for batch in args.batch:
            if (name, batch) in clock.seconds:
                own, base = clock.seconds[name, batch], clock.seconds[BASELINE, batch]
                row[f"tokens_per_second_{batch}"] = batch * (args.new_tokens - 1) / statistics.median(own)
                row[f"ratio_{batch}"] = statistics.median(b / o for b, o in zip(base, own, strict=True))
        rows_of_table.append(row)
    about = {
        "machine": machine(),
        "versions": ", ".join(f"{name} {number}" for name, number in sorted(clock.versions.items())),
        "method": f"{len(prompts)} prompts, {args.new_tokens} greedy tokens each, ends of texts suppressed; batch 1: "
        f"the prompts one by one; larger batches: prompts of {args.prompt_tokens} tokens, {args.rounds} rounds; all "
        "ways in turn, medians; decoding is a call's time less that of the same call with one new token",
        "command": f"python benchmarks/frontier.py MODEL{' ADAPTER' * len(args.adapters)} --batch "
        f"{','.join(map(str, args.batch))} --new-tokens "
        f"{args.new_tokens} --prompt-tokens {args.prompt_tokens} --rounds {args.rounds}"
        + f" --limit {args.limit} --threads {args.threads}" * bool(args.limit)
        + f" --without {args.without}" * bool(args.without)
        + " --gguf FILE" * bool(args.gguf)
        + "".join(f' --pruned "{name}=FOLDER"' for name, _ in args.pruned),
    }
    save(rows_of_table, about, args.batch, args.output)


@dataclass
class Clock:
    """What was measured: texts and bytes by way, seconds of decoding by way and batch, why a way failed."""

    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def timed(
    known: Mapping[str, Way], prompts: Sequence[list[int]], equal: Sequence[list[int]], args: argparse.Namespace
) -> Clock:
    """Ask all ways in turn: for the prompts one by one, then for batches of the ``equal`` ones."""
    clock = Clock()
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        for name, way in known.items():
            if way.process not in running:
                print(f"loading {name}", flush=True)
                running[way.process] = stack.enter_context(_start(way, args))
                clock.versions |= running[way.process].versions

        def ask(name: str, rows: Sequence[list[int]], warm: bool = True) -> None:
            """Time a call beside the same prompts with one new token: what is left between them is decoding."""
            process, call = running[known[name].process], dict(known[name].call)
            try:
                prompt = process.ask(rows, 1, call)
                job = process.ask(rows, args.new_tokens, call)
            except EngineFailed as error:
                print(f"{name}: {error}", flush=True)
                if name == BASELINE:
                    raise
                clock.failed[name] = str(error)
                clock.seconds.pop((name, len(rows)), None)  # rounds that others went on with
                return
            if warm:
                clock.seconds.setdefault((name, len(rows)), []).append(job["seconds"] - prompt["seconds"])
                clock.memory[name] = max(clock.memory.get(name, 0), job["peak_rss"])
                clock.texts.setdefault(name, []).extend(job["tokens"] if len(rows) == 1 else [])

        for number, prompt in enumerate([prompts[0], *prompts]):
            print(f"prompt {number} of {len(prompts)}", flush=True)
            for name in known:
                if name not in clock.failed:
                    ask(name, [prompt], warm=number > 0)
        for batch in [each for each in args.batch if each > 1]:
            rows = [equal[i % len(equal)] for i in range(batch)]
            for number in range(args.rounds + 1):
                print(f"batch {batch}, round {number}", flush=True)
                for name in [name for name, way in known.items() if not way.alone and name not in clock.failed]:
                    ask(name, rows, warm=number > 0)
    return clock


def _start(way: Way, args: argparse.Namespace) -> Running:
    """Start a way's process, with its model loaded."""
    engine = way.engine
    args.work.mkdir(parents=True, exist_ok=True)
    job = {
        "checkpoint": engine.options.get("checkpoint", str(args.model)),
        "converted": str(args.work / engine.program),
        "precision": engine.precision,
        "options": dict(engine.options),
        "threads": args.threads,
        "rows": max(args.batch),
        "prompt_tokens": args.prompt_tokens + 64,  # room for prompts as they are
        "new_tokens": args.new_tokens,
    }
    log = re.sub(r"[^\w.-]+", "-", way.process) + ".log"
    return Running(engine, job, args.environments, args.work / log)


def written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], count: int
) -> list[list[int]]:
    """Return the greedy tokens of full depth, without an end."""
    full, found = Schedule.full(model.config.num_hidden_layers), []
    ids: Any = Ids(tokenizer.pad_token_id)
    for prompt in prompts:
        options: Any = {"min_new_tokens": count, "max_new_tokens": count}
        (completion,) = generate_ids(model, ids, [prompt], full, 1, **options).completions
        found.append([int(token) for token in completion.text.split()])
    return found


def judged(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    reference: Sequence[list[int]],
) -> dict[str, float]:
    """Return how unlikely texts are to ``model`` at full depth, how like its own, and how repetitive."""
    collate = Collator(tokenizer.pad_token_id)
    rows = [{"prompt_ids": p, "response_ids": t} for p, t in zip(prompts, texts, strict=True)]
    batches = [collate(rows[at : at + 8]) for at in range(0, len(rows), 8)]
    own, theirs = (tokenizer.batch_decode([*each]) for each in (texts, reference))
    scores = {}
    for metric in (Agreement(), Repetition()):
        found = metric.rows(own, [[each] for each in theirs])
        scores[metric.name] = metric.corpus(found.sum(0), len(found))
    return scores | {"nats": response_loss(model, batches, Schedule.full(model.config.num_hidden_layers))}


def save(rows: Sequence[Mapping[str, Any]], about: Mapping[str, str], batches: Sequence[int], folder: Path) -> None:
    """Write ``table.json``, which docs/frontier.md prints, and ``frontier.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(dict(row)) for row in rows)
    write(folder / "table.json", f'{{"about": {json.dumps(dict(about))},\n"rows": [\n{lines}\n]}}\n')
    figure, panels = plt.subplots(1, len(batches), figsize=(5 * len(batches), 5), layout="constrained", squeeze=False)
    for panel, batch in zip(panels[0], batches, strict=True):
        for number, row in enumerate(rows):
            look = {"color": f"C{number}", "marker": "osv^<>DPX*"[number % 10], "linestyle": "", "alpha": 0.8}
            panel.plot(row.get(f"ratio_{batch}", math.nan), row["nats"], label=row["way"], **look)
        panel.set(xlabel="tokens per second, times full depth's in bfloat16", ylabel="nats of its texts, to full depth")
        panel.set_title(f"batch {batch}")
        panel.margins(x=0.1, y=0.1)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(folder / "frontier.png", dpi=110)


def _named(text: str) -> tuple[str, str]:
    """Return the parts of NAME=FOLDER."""
    name, given, folder = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=FOLDER")
    return name, folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument(
        "adapters", type=Path, nargs="+", help="folders of its adapters; of a speed, the first that has it"
    )
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    named: Any = {"type": _named, "default": [], "action": "append", "metavar": "NAME=FOLDER"}
    parser.add_argument("--pruned", help="a smaller checkpoint made of it; may be repeated", **named)
    parser.add_argument("--without", default="", help="int8: this CPU cannot")
    parser.add_argument("--prompts", type=Path, default=ROOT / "results" / "smollm2" / "prompts.jsonl")
    parser.add_argument("--limit", type=int, help="take so many prompts")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "frontier")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "frontier")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers")
    return parser


if __name__ == "__main__":
    main()
