"""Stock vLLM and vLLM with the plugin in turn, on the same machine in the same run: throughput and time per step.

    python benchmarks/serving --slots 32 --rounds 2                      # OPT-1.3B's shape, bfloat16
    python benchmarks/serving --precision w8a8 --loads lockstep          # int8, one load alone
    python benchmarks/serving --model smollm2 --adapter results/smollm2/adapter    # what an adapter costs a step

Lockstep: as many requests as slots, all of one length, start together; the mean step of those without a prompt
counts. Continuous: three requests per slot, all waiting, of random lengths, so that prompts come in while others write.
Every budget runs in one engine: a request's schedule is its own. With --adapter the schedules are those of the adapter,
and run in one engine without and in one with what it learnt. Each round is saved when it is done, and a later call adds
to it; medians count, and ratios are to stock vLLM in the same round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from skipdecode import Schedule
from skipdecode.errors import SkipDecodeError, UsageError
from skipdecode.model.adapter import read_schedules
from skipdecode.model.config import num_layers

from .models import config_of, label, longest, options, parse, prepare, settings
from .processes import PLUGIN, Talking
from .report import save
from .rounds import STOCK, Rounds, Row

PROGRAM = "benchmarks/serving"
FOLDER = Path(__file__).resolve().parent
#: Forms of a schedule beside its speed-up: (what is added to its key, fields).
FORMS: dict[str, tuple[float, dict[str, Any]]] = {
    "flat": (0.0, {"decay": "constant"}),
    "falling": (0.01, {"decay": "linear"}),
    "prompt": (0.02, {"decay": "constant", "prompt_layers": "max"}),  # the prompt at the steps' depth too
}
LOADS = ("lockstep", "continuous")
#: The engine with the adapter.
ADAPTER = "adapter"
#: What is asked of the engines in a round: (engine, form, speed-up) -> key of its schedule.
Asked = dict[tuple[str, str, float], float]


def asked(forms: Sequence[str], speedups: Sequence[float]) -> Asked:
    """Both engines at full depth, and the plugin in each form at each speed-up."""
    found = {(STOCK, "", 1.0): 1.0, (PLUGIN, "", 1.0): 1.0}
    return found | {(PLUGIN, form, s): round(s + FORMS[form][0], 2) for s in speedups for form in forms}


def with_adapter(given: argparse.Namespace) -> tuple[Asked, dict[float, Schedule]]:
    """Stock, then each of the adapter's schedules without it and with it; and these schedules."""
    made = read_schedules(given.adapter)
    wanted: Asked = {(STOCK, "", 1.0): 1.0}
    return wanted | {(engine, "", key): key for key in made for engine in (PLUGIN, ADAPTER)}, made


def schedules(wanted: Asked, num_layers: int, horizon: int) -> dict[float, Schedule]:
    """The schedule of each key."""
    made = {1.0: Schedule.full(num_layers)}
    for (_, form, speedup), key in wanted.items():
        if form:
            made[key] = Schedule.for_speedup(speedup, num_layers, horizon, **FORMS[form][1])
    return made


@contextmanager
def engines(
    given: argparse.Namespace, made: dict[float, Schedule], names: Collection[str]
) -> Iterator[tuple[dict[str, Talking], str]]:
    """Those of these names, all loaded, and their versions."""
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": longest(given),
        "max_num_seqs": max(given.slots),
        "max_num_batched_tokens": max(2048, longest(given)),
        "kv_cache_memory_bytes": given.kv_gib << 30,
        "enable_prefix_caching": False,  # the same prompts come in every round
        "enforce_eager": given.eager,
        "disable_log_stats": True,
        **given.engine,
    }
    entry = {"schedules": {f"{key:g}": schedule.to_dict() for key, schedule in made.items()}}
    serving = given.serving | {"speedups": [*made]}
    own = {
        STOCK: {},
        PLUGIN: {"hf_overrides": {"skipdecode": entry}, "additional_config": {"skipdecode": serving}},
        ADAPTER: {"additional_config": {"skipdecode": serving | {"adapter": str(given.adapter)}}},
    }
    job = {"model": str(prepare(given))}
    print("loading", *names, flush=True)
    with ExitStack() as stack, ThreadPoolExecutor() as at_once:
        running, answers, versions = {}, {}, ""
        for name in names:
            command, log = [given.python, str(FOLDER / "engine.py")], given.work / "logs" / f"{name}.log"
            running[name] = stack.enter_context(Talking(command, log, "" if name == STOCK else PLUGIN))
            answers[name] = at_once.submit(running[name].ask, job | {"options": common | own[name]})
        for name, one in running.items():
            answer = answers[name].result()
            if answer["plugin"] != (name != STOCK):
                raise RuntimeError(f"the plugin is {'there' if answer['plugin'] else 'not there'}: see {one.log}")
            versions = answer["versions"]
        yield running, versions


def workload(given: argparse.Namespace, load: str, slots: int) -> list[list[int]]:
    """Prompt and new tokens of each request."""
    if load == "lockstep":
        return [[given.prompt_tokens, given.new_tokens]] * slots
    source = random.Random(0)
    lengths = [source.randint(given.new_tokens // 2, given.new_tokens * 3 // 2) for _ in range(3 * slots)]
    return [[given.prompt_tokens, new] for new in lengths]


def summary(answer: dict[str, Any], slots: int) -> Row:
    """Of one run; steps are those in which every slot writes and none reads a prompt."""
    plain = [step for step in answer["steps"] if step[2] == step[3] == slots]
    values = {
        "tokens_per_second": answer["tokens"] / answer["seconds"],
        "prompt_share": sum(step[0] for step in answer["steps"] if step[2] > step[3]) / answer["seconds"],
    }
    if plain:
        # Means: steps of a falling depth differ, and the layers they are compared with are a mean too.
        values["step_ms"] = 1e3 * statistics.mean(step[0] for step in plain)
        if plain[0][1] is not None:
            values["forward_ms"] = 1e3 * statistics.mean(step[1] for step in plain)
    if layers := answer["layers"]:
        values |= {f"layers_{name}": layers[name] / layers["full"] for name in ("needed", "run")}
    return values


def measure(given: argparse.Namespace, loads: dict[tuple[int, str], Rounds], num_layers: int) -> Iterator[Rounds]:
    """What has one more round, after each."""
    if given.adapter:
        wanted, made = with_adapter(given)
    else:
        wanted = asked(given.forms, given.speedups)
        made = schedules(wanted, num_layers, given.new_tokens)
    full = Schedule.full(num_layers)
    serving = ", ".join(f"{name} {value}" for name, value in given.serving.items())
    with engines(given, made, dict.fromkeys(engine for engine, *_ in wanted)) as (running, versions):

        def serve(engine: str, key: float, requests: list[list[int]]) -> dict[str, Any]:
            return running[engine].ask({"requests": [[*lengths, key] for lengths in requests]})

        for (engine, _, _), key in wanted.items():
            for slots in given.slots:
                serve(engine, key, [[8, 4]] * slots)  # to warm up; prompts take longest
        for number in range(given.rounds):
            for (slots, load), rounds in loads.items():
                rows = []
                for (engine, form, speedup), key in wanted.items():
                    answer = serve(engine, key, workload(given, load, slots))
                    done = f"{slots} slots, {load}, round {number + 1}, {engine} {speedup:g}x {form}"
                    print(f"{done}: {answer['seconds']:.1f} s", flush=True)
                    row: Row = {"engine": engine, "form": form, "speedup": speedup}
                    row["step_layer_ratio"] = num_layers / made.get(key, full).average_depth(given.new_tokens - 1)
                    rows.append(row | {"serving": serving if engine != STOCK else ""} | summary(answer, slots))
                rounds.add(rows, versions=versions, command=given.command)
                yield rounds


def numbers(text: str) -> list[int]:
    """Of an option, with commas between."""
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the tables after each round."""
    parser = options(PROGRAM, __doc__)
    parser.add_argument("--slots", default="32", type=numbers, help="requests that write at once; several: in turn")
    parser.add_argument("--loads", default="lockstep,continuous", type=lambda text: text.split(","))
    parser.add_argument("--forms", default="flat,falling,prompt", type=lambda text: text.split(","))
    parser.add_argument("--speedups", default="2,3,5", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--adapter", type=Path, help="folder of an adapter: its speeds, without and with it")
    parser.add_argument("--rounds", type=int, default=3, help="so many more than there are")
    small = {"shape": "opt-125m", "layers": 4, "speedups": [2.0], "slots": [2], "prompt_tokens": 8, "new_tokens": 6}
    try:
        given = parse(parser, arguments, {"shape": "opt-1.3b"}, small | {"rounds": 1, "kv_gib": 1, "eager": True})
        for name, known in (("loads", LOADS), ("forms", FORMS)):
            if unknown := set(getattr(given, name)) - set(known):
                raise UsageError(f"--{name}: there is no {', '.join(sorted(unknown))}; known are {', '.join(known)}")
        if given.adapter and not given.model:
            raise UsageError("--adapter is of a --model: name the one that it was trained on")
        layers = num_layers(config_of(given))
        loads = {}
        several = {"max_num_seqs": max(given.slots)} if len(given.slots) > 1 else {}
        for slots, load in product(given.slots, given.loads):
            folder = given.output / (f"{label(given)}-{slots}" + "-adapter" * bool(given.adapter)) / load
            loads[slots, load] = Rounds(folder, settings(given) | {"slots": slots, "load": load} | several)
        for rounds in measure(given, loads, layers):
            save(rounds)
    except SkipDecodeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    for rounds in loads.values():
        print((rounds.folder / "table.md").read_text(encoding="utf-8"))
    return 0
