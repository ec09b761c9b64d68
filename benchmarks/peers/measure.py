"""One engine beside the baseline, round by round; finished cells are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skipdecode.errors import UsageError
from skipdecode.files import read_json, write

from . import checkpoint
from .catalogue import BASELINE, ENGINES, call
from .processes import EngineFailed, Running

#: New tokens of the round that is not timed: compiling, first touches of memory.
WARM_UP = 8


@dataclass(frozen=True)
class Settings:
    """What is timed: the same for every engine of a report.

    Attributes:
        shape: one of ``checkpoint.SHAPES``.
        prompt_tokens, new_tokens: of every row; end-of-sequence is off.
        rounds: timed ones, after one that warms up.
        threads: of every engine.
        precision: the baseline's, and what engines in bfloat16 are run in.
    """

    shape: str
    prompt_tokens: int
    new_tokens: int
    rounds: int
    threads: int
    precision: str = "bfloat16"


@dataclass(frozen=True)
class Places:
    """Where checkpoints (and their converted forms), environments and reports are."""

    work: Path
    environments: Path
    output: Path

    def row(self, shape: str, engine: str, batch: int) -> Path:
        """The file of a finished cell."""
        return self.output / "rows" / f"{shape}-{engine}-{batch}.json"


def measure(
    settings: Settings,
    engines: Sequence[str],
    batches: Sequence[int],
    places: Places,
    say: Callable[[str], object],
    again: bool = False,
) -> Iterator[dict[str, Any]]:
    """Rows of ``engines``, timed together: in each round the baseline, then every call of every engine.

    What is on the disk is not timed ``again`` unless that is asked. An engine that fails is a row with its reason.
    """
    missing: dict[str, list[int]] = {}
    for name in engines:
        for batch in batches:
            if (file := places.row(settings.shape, name, batch)).exists() and not again:
                yield from _kept(file, settings)
            else:
                missing.setdefault(name, []).append(batch)
    if not missing:
        return
    with ExitStack() as stack:
        started: dict[str, Running] = {}
        for name in (BASELINE, *missing):
            say(f"{settings.shape}: loading {name}")
            try:
                started[name] = stack.enter_context(_start(name, settings, max(batches), places))
            except (EngineFailed, UsageError) as error:
                if name == BASELINE:
                    raise
                yield from ({**_head(name, settings, batch), "failed": str(error)} for batch in missing[name])
        for batch in batches:
            present = [name for name in started if batch in missing.get(name, ())]
            if present:
                yield from _cell(settings, {n: started[n] for n in (BASELINE, *present)}, batch, places, say)


def _start(name: str, settings: Settings, rows: int, places: Places) -> Running:
    """The engine's process, with its model loaded."""
    engine = ENGINES[name]
    config = checkpoint.SHAPES[settings.shape]
    if config.model_type not in engine.families:
        raise UsageError(f"it runs {' and '.join(engine.families)}, not {config.model_type}")
    kind = engine.options.get("weights", precision := _precision(name, settings))
    job = asdict(settings) | {
        "checkpoint": str(places.work / settings.shape),
        "converted": str(places.work / f"{settings.shape}-{engine.program}-{kind}"),
        "precision": precision,
        "options": dict(engine.options),
        "rows": rows,
    }
    logs = places.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return Running(engine, job, places.environments, logs / f"{settings.shape}-{name}.log")


def _precision(name: str, settings: Settings) -> str:
    own = ENGINES[name].precision
    return settings.precision if own == "bfloat16" else own


def _head(name: str, settings: Settings, batch: int, speedup: int = 1) -> dict[str, Any]:
    """What names a row."""
    precision = _precision(name, settings)
    forms = {"int8": f"int8 weights, {precision}", "w8a8": "int8 weights and activations"}
    precision = forms.get(ENGINES[name].options.get("weights", ""), precision)
    return {"shape": settings.shape, "engine": name, "precision": precision, "speedup": speedup, "batch": batch}


def _cell(
    settings: Settings, running: dict[str, Running], batch: int, places: Places, say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """All rounds of one batch size. The engines that are done are on the disk when this returns."""
    rounds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for number in range(settings.rounds + 1):
        say(f"{settings.shape}, batch {batch}, {', '.join(running)}: {f'round {number}' if number else 'warming up'}")
        for name, process in running.items():
            try:
                for speedup in ENGINES[name].speedups if name not in failed else ():
                    timed = _time(process, settings, batch, speedup, WARM_UP if number == 0 else settings.new_tokens)
                    if number:
                        rounds.setdefault((name, speedup), []).append(timed)
            except EngineFailed as error:
                if name == BASELINE:
                    raise
                failed[name] = str(error)
    done = [{**_head(name, settings, batch), "failed": reason} for name, reason in failed.items()]
    for name in [name for name in running if name != BASELINE and name not in failed]:
        rows = [
            _head(name, settings, batch, speedup)
            | {"settings": asdict(settings), "versions": running[name].versions, "beside": list(running)}
            | _split(rounds[name, speedup], "")
            | _split(rounds[BASELINE, 1], "baseline_")
            for speedup in ENGINES[name].speedups
        ]
        file = places.row(settings.shape, name, batch)
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, json.dumps(rows))
        done += rows
    return done


def _split(rounds: Sequence[dict[str, Any]], prefix: str) -> dict[str, Any]:
    """The clock of every round, and the tokens, which are the same in all."""
    clock = [{name: value for name, value in timed.items() if name != "tokens"} for timed in rounds]
    return {f"{prefix}rounds": clock, f"{prefix}tokens": rounds[-1]["tokens"]}


def _time(process: Running, settings: Settings, batch: int, speedup: int, new_tokens: int) -> dict[str, Any]:
    """The job, and the same prompts with one new token: what is left between the two is decoding."""
    prompts = checkpoint.prompts(settings.shape, batch, settings.prompt_tokens)
    options = call(speedup, checkpoint.SHAPES[settings.shape].num_hidden_layers, settings.new_tokens)
    prompt = process.ask(prompts, 1, options)
    job = process.ask(prompts, min(new_tokens, settings.new_tokens), options)
    return {
        "prompt_seconds": prompt["seconds"],
        "job_seconds": job["seconds"],
        "peak_rss": max(prompt["peak_rss"], job["peak_rss"]),
        "tokens": job["tokens"],
    }


def _kept(file: Path, settings: Settings) -> list[dict[str, Any]]:
    """Rows of an earlier call. Raises UsageError if they are of other settings."""
    rows: list[dict[str, Any]] = read_json(file)
    if any(row["settings"] != asdict(settings) for row in rows):
        raise UsageError(f"{file} was timed with other settings: give another --output, or remove its folder")
    return rows
