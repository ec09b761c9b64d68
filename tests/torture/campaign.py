"""Runs the parts, each for its time, and tells what came of them."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from helpers.tiny import save_checkpoint
from torture import disks, fuzz, habits, kills, models
from torture.attempt import Attempt, Found, Kind, Limited, rows, write_jsonl

PARTS: dict[str, dict[str, Kind]] = {
    "kills": kills.KINDS,
    "disks": disks.KINDS,
    "fuzz": fuzz.KINDS,
    "threads": models.THREADS,
    "families": models.FAMILIES,
    "habits": habits.KINDS,
}
#: For each part, on two cores; 15 minutes in all.
SECONDS = {"kills": 240, "disks": 90, "fuzz": 270, "threads": 60, "families": 120, "habits": 120}

console = Console(stderr=True, highlight=False)


@dataclass
class Tally:
    """What came of the attempts of one kind."""

    attempts: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    finds: list[str] = field(default_factory=list)


def main() -> int:
    """The command; returns its exit code: 1 if anything did not hold."""
    parser = argparse.ArgumentParser(
        "python tests/torture", description="Attacks on SkipDecode, each drawn from its kind and seed."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or PART/KIND (default: all)")
    parser.add_argument("--seconds", type=float, help="for each part (default: its own, 15 minutes in all)")
    parser.add_argument("--attempts", type=int, help="of each kind, instead of seconds")
    parser.add_argument(
        "--seed", type=int, default=0, help="of each kind's first attempt; the next one has the next seed"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of attempts that found something")
    parser.add_argument("--json", action="store_true", help="the table as JSON on standard output")
    options = parser.parse_args()
    chosen: dict[str, dict[str, Kind]] = {}
    for name in options.parts or PARTS:
        part, _, kind = name.partition("/")
        if part not in PARTS or (kind and kind not in PARTS[part]):
            parser.error(f"{name!r} is none of {', '.join(f'{p}/{k}' for p in PARTS for k in PARTS[p])}")
        chosen.setdefault(part, {}).update({kind: PARTS[part][kind]} if kind else PARTS[part])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="torture-") as base:
        tallies = _run(options, chosen, Path(base))
    _show(tallies)
    if options.json:
        print(json.dumps({name: vars(tally) for name, tally in tallies.items()}))
    return int(any(tally.finds for tally in tallies.values()))


def _run(options: argparse.Namespace, chosen: dict[str, dict[str, Kind]], base: Path) -> dict[str, Tally]:
    model = save_checkpoint(base / "model", layers=4)
    data = base / "data"
    data.mkdir()
    for number, split in enumerate(("train", "validation", "test")):
        write_jsonl(data / f"{split}.jsonl", rows(Random(number), 12))
    shared: dict[str, Any] = {"model": model, "data": data, "limits": Limited(base)}
    tallies: dict[str, Tally] = {}
    console.print("importing what is attacked, once for all processes", style="dim")
    Attempt(Random(0), base, **shared).run("schedule", "--layers", 2).sound(0)
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for part, kinds in chosen.items():
            names = {f"{part}/{kind}": attack for kind, attack in kinds.items()}
            tallies |= {name: Tally() for name in names}
            most, seconds = options.attempts or math.inf, options.seconds or SECONDS[part]
            seconds = math.inf if options.attempts else seconds
            bar = progress.add_task(part, total=min(most * len(kinds), seconds), rate="")
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                # Each kind gets the same time: quick ones get more attempts.
                name = min(
                    (n for n in names if tallies[n].attempts < most), key=lambda n: tallies[n].seconds, default=""
                )
                if not name:
                    break
                tally, start = tallies[name], time.monotonic()
                find = _attempt(name, options.seed + tally.attempts, names[name], base, shared, tally, options.keep)
                tally.attempts += 1
                tally.seconds += time.monotonic() - start
                if find:
                    tally.finds.append(find)
                    console.print(find, style="red", markup=False, soft_wrap=True)
                done, passed = sum(tallies[n].attempts for n in names), time.monotonic() - began
                found = sum(len(tallies[n].finds) for n in names)
                rate = f"{done} attempts, {60 * done / passed:.0f} a minute, {found} found"
                progress.update(bar, completed=done if math.isinf(seconds) else passed, rate=rate)
    return tallies


def _attempt(
    name: str, seed: int, attack: Kind, base: Path, shared: dict[str, Any], tally: Tally, keep: bool
) -> str | None:
    """What the attack found, with the command that does it again."""
    folder = Path(tempfile.mkdtemp(dir=base))
    random = Random(f"{name} {seed}")
    torch.manual_seed(seed)
    try:
        attack(Attempt(random, folder, **shared, counts=tally.counts))
    except Found as found:
        words = str(found)
    except Exception:  # an attack itself must not end the campaign; whatever it was, somebody must look
        words = traceback.format_exc()
    else:
        shutil.rmtree(folder)
        return None
    if keep:
        kept = shutil.copytree(folder, Path(tempfile.mkdtemp(prefix="torture-kept-")), dirs_exist_ok=True)
        words += f"\nkept in {kept}"
    shutil.rmtree(folder, ignore_errors=True)
    return f"FOUND {words}\nagain: python tests/torture {name} --seed {seed} --attempts 1\n"


def _show(tallies: dict[str, Tally]) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("", "attempts", "found", "seconds", "of them"):
        table.add_column(head, justify="left" if head in ("", "of them") else "right", no_wrap=head == "")
    for name, tally in tallies.items():
        of_them = ", ".join(f"{count:,} {what}" for what, count in sorted(tally.counts.items()))
        table.add_row(name, f"{tally.attempts:,}", str(len(tally.finds)), f"{tally.seconds:.0f}", of_them)
    whole = [
        sum(values) for values in zip(*((t.attempts, len(t.finds), t.seconds) for t in tallies.values()), strict=True)
    ]
    table.add_row("all", *(f"{value:,.0f}" for value in whole), style="bold")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
