"""Who shares a step: what each switch of the plugin's scheduler gains, in one engine.

    python benchmarks/serving sharing                        # OPT-1.3B's shape, bfloat16

Queues as in the main benchmark's continuous load. One of requests that are all at --fast: let in one by one, by groups
of several sizes, and by the group that the server chooses. And one whose requests are at --slow and --fast in turn:
all in every step, and slow ones with at most so many times the time per token. Ratios are to a scheduler that does
neither.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from skipdecode import Schedule
from skipdecode.clock.tables import save_tables
from skipdecode.core.checkpoint_config import layer_count
from skipdecode.errors import SkipDecodeError

from .models import config_of, label, options, parse, settings
from .processes import PLUGIN, Talking
from .rounds import Rounds, Row, shown
from .run import engines, workload

PROGRAM = "benchmarks/serving sharing"
#: Neither groups nor turns.
PLAIN: dict[str, Any] = {"admit_together": 1, "max_slowdown": 1.0}
RATIOS = {"tokens_per_second": False, "slow_token_ms": True, "fast_token_ms": True, "first_token_ms": True}
HEADS = ["requests", "let in by", "slowdown", "tokens/s", "of plain", "per token, ms: slow", "of plain", "fast"]
HEADS += ["of plain", "first token, ms", "rounds"]
ABOUT = {
    "let in by": "--admit-together: the size of groups of new requests",
    "slowdown": "--max-slowdown: of slow rows, whose steps fast rows leave out",
    "per token": "between a request's tokens, on average; the median over the requests of that speed",
    "first token": "since the start, when all requests wait; the median over them",
    "of plain": "the row's tokens/s over those of the queue's first row, or the first row's time over the row's, in "
    "the same round; medians",
}


def settled(queue: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The switches that a queue is served with, the plain ones first."""
    if queue == "fast":
        return [PLAIN, *(PLAIN | {"admit_together": size} for size in ("auto", *given.groups))]
    return [PLAIN, *(PLAIN | {"max_slowdown": most} for most in given.slowdowns)]


def summary(answer: dict[str, Any], requests: list[list[float]], fast: float) -> Row:
    """Of one run."""
    token: dict[str, list[float]] = {"slow_token_ms": [], "fast_token_ms": []}
    for (_, new, speedup), (first, last) in zip(requests, answer["requests"], strict=True):
        token["fast_token_ms" if speedup == fast else "slow_token_ms"].append(1e3 * (last - first) / (new - 1))
    return {
        "tokens_per_second": answer["tokens"] / answer["seconds"],
        "first_token_ms": 1e3 * statistics.median(first for first, _ in answer["requests"]),
        **{name: statistics.median(found) if found else None for name, found in token.items()},
    }


def measure(given: argparse.Namespace, rounds: Rounds, num_layers: int) -> Iterator[Rounds]:
    """The rounds, after each: one queue, with each of its switches."""
    made = {
        speedup: Schedule.for_speedup(speedup, num_layers, given.new_tokens, decay="constant")
        for speedup in (given.slow, given.fast)
    }
    with engines(given, made, names=(PLUGIN,)) as (running, versions):
        engine: Talking = running[PLUGIN]

        def serve(requests: list[list[float]], sharing: dict[str, Any]) -> dict[str, Any]:
            return engine.ask({"requests": requests, "sharing": sharing})

        serve([[8, 4, speedup] for speedup in made] * given.slots, PLAIN)  # to warm up
        for number in range(given.rounds):
            for queue in given.queues:
                speedups = (given.fast,) if queue == "fast" else (given.slow, given.fast)
                lengths = workload(given, "continuous")
                requests = [[*its, speedups[place % len(speedups)]] for place, its in enumerate(lengths)]
                rows = []
                for sharing in settled(queue, given):
                    answer = serve(requests, sharing)
                    print(f"{queue}, round {number + 1}, {sharing}: {answer['seconds']:.1f} s", flush=True)
                    rows.append({"queue": queue} | sharing | summary(answer, requests, given.fast))
                rounds.add(rows, versions=versions, command=given.command)
                yield rounds


def save(rounds: Rounds) -> None:
    """table.md, table.csv and table.json beside the rounds."""
    rows = rounds.medians(["queue", "admit_together", "max_slowdown"], RATIOS)
    rows.sort(key=lambda row: row["queue"])
    names = ("model", "slots", "slow", "fast")
    rows = [{name: rounds.settings[name] for name in names} | row for row in rows]
    save_tables(rounds.folder, rows, HEADS, [_cells(row) for row in rows], rounds.about() | ABOUT)


def _cells(row: Row) -> list[str]:
    slow, fast = (f"{row[name]:g}x" for name in ("slow", "fast"))
    return [
        f"all {fast}" if row["queue"] == "fast" else f"{slow} and {fast} in turn",
        str(row["admit_together"]),
        f"{row['max_slowdown']:g}",
        shown(row, "tokens_per_second", "{:.1f}"),
        shown(row, "tokens_per_second_ratio", "{:.2f}x"),
        shown(row, "slow_token_ms", "{:.0f}"),
        shown(row, "slow_token_ms_ratio", "{:.2f}x"),
        shown(row, "fast_token_ms", "{:.0f}"),
        shown(row, "fast_token_ms_ratio", "{:.2f}x"),
        shown(row, "first_token_ms", "{:.0f}"),
        str(row["rounds"]),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the tables after each round."""
    parser = options(PROGRAM, __doc__)
    parser.add_argument("--queues", default="fast,mixed", type=lambda text: text.split(","))
    parser.add_argument("--slow", type=float, default=1.0, help="speed-up")
    parser.add_argument("--fast", type=float, default=5.0, help="speed-up")
    parser.add_argument("--groups", default="4,8,16", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--slowdowns", default="2,3", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--rounds", type=int, default=1, help="so many more than there are")
    small = {"shape": "opt-125m", "layers": 4, "slots": 2, "prompt_tokens": 8, "new_tokens": 6, "kv_gib": 1}
    small |= {"slow": 1.0, "fast": 2.0, "groups": [2], "slowdowns": [2.0], "eager": True}
    try:
        given = parse(parser, arguments, {"shape": "opt-1.3b"}, small)
        num_layers = layer_count(config_of(given))
        own = {name: getattr(given, name) for name in ("slow", "fast", "serving")}
        folder = given.output / f"{label(given)}-{given.slots}" / "sharing"
        rounds = Rounds(folder, settings(given) | own)
        for each in measure(given, rounds, num_layers):
            save(each)
    except SkipDecodeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    print((folder / "table.md").read_text(encoding="utf-8"))
    return 0
