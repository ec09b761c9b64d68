"""``skipdecode plan``: what speed-ups in layers give in seconds on this machine, and which one to ask for."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from ..errors import ScheduleError
from . import options as o
from .console import Bar, out, print_table, say


def plan(
    model: o.Model,
    adapter: o.Adapter = None,
    speedups: o.Speedups = None,
    count: Annotated[
        Literal["layers", "decoding", "end-to-end"], Option(help="What the requested speeds count.")
    ] = "layers",
    batch_size: o.BatchSize = 32,
    prompt_tokens: Annotated[int, Option(min=1, help="Tokens of a prompt.")] = 64,
    new_tokens: Annotated[int, Option(min=2, help="New tokens of a sequence.")] = 128,
    profile: Annotated[Path | None, Option(help="File of measurements; default: in the user's cache.")] = None,
    dtype: o.Dtype = "auto",
    as_json: o.Json = False,
) -> None:
    """Predict what each speed gives on this machine, which is measured first.

    skipdecode plan fast --prompt-tokens 200 --new-tokens 100
    """
    from ..latency import planner
    from ..latency.profile import Profile, cache_path
    from ..loading.device import machine
    from ..loading.load import Checkpoint
    from ..schedule import choose_schedule

    checkpoint = Checkpoint.resolve(model, adapter)
    trained = checkpoint.schedules
    layers = checkpoint.num_layers
    work = planner.Workload(batch_size, prompt_tokens, new_tokens)
    targets = o.parse_speedups(speedups) or tuple(sorted(k for k in trained if k > 1))
    targets = targets or tuple(k for k in (1.5, 2.0, 3.0, 4.0, 5.0) if k <= layers)
    if count == "layers":
        candidates = [checkpoint.schedule(target) for target in targets]
    elif checkpoint.adapter:
        candidates = list(trained.values())
    else:
        candidates = planner.constant_depths(choose_schedule(trained, layers, min(2, layers)))

    here = machine()
    settings = {"dtype": dtype, "adapter": None if checkpoint.adapter is None else str(checkpoint.adapter)}
    path = profile or cache_path(checkpoint.name, machine=here, fingerprint=checkpoint.fingerprint, **settings)
    measured = Profile.load(path) if path.exists() else Profile(checkpoint.name, here, settings)
    wanted = measured.missing([batch_size], work.lengths, planner.to_measure(candidates))
    if wanted and measured.machine == here:  # a profile of another machine has to do as it is
        loaded = checkpoint.load(dtype)
        with Bar() as bar:
            bar.show("measuring this machine", 0, len(wanted) * 4)
            measured.measure(loaded, checkpoint.tokenizer, wanted, rounds=3, on_run=bar.advance)
        measured.save(path)

    full = planner.predict(measured, choose_schedule({}, layers, 1), work)
    names = {schedule: speedup for speedup, schedule in trained.items()}
    rows = [_row(1.0, full, names)]
    for number, target in enumerate(targets):
        try:
            if count == "layers":
                prediction = planner.predict(measured, candidates[number], work)
            else:
                prediction = planner.plan(measured, work, target, candidates, count)
            rows.append(_row(target, prediction, names))
        except ScheduleError as error:
            rows.append({"requested": target, "refused": str(error)})
            say(str(error))
    heads = [f"requested ({count})", "--speedup", "layers", "ms per step"]
    heads += ["decoding speed-up", "end-to-end speed-up", "seconds"]
    print_table(heads, [_cells(row) for row in rows if "refused" not in row])
    out.print(f"batch {batch_size}, {prompt_tokens} prompt tokens, {new_tokens} new ones; predicted from {path}")
    out.print(f"measured on {measured.machine}", markup=False)
    if as_json:
        print(json.dumps({"machine": measured.machine, "model": measured.model, "rows": rows}))


def _row(requested: float, prediction: Any, names: dict[Any, float]) -> dict[str, Any]:
    schedule = prediction.schedule
    return {
        "requested": requested,
        "speedup": names.get(schedule, round(schedule.num_layers / prediction.layers, 2)),
        "layers": round(prediction.layers, 2),
        "step_ms": round(1e3 * prediction.step_seconds, 3),
        "seconds": round(prediction.seconds, 4),
        **{f"{name.replace('-', '_')}_speedup": round(value, 3) for name, value in prediction.speedups.items()},
        "schedule": schedule.to_dict(),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    layers = [f"{row['requested']:g}x", f"{row['speedup']:g}", f"{row['layers']:g}", f"{row['step_ms']:.2f}"]
    return [*layers, f"{row['decoding_speedup']:.2f}x", f"{row['end_to_end_speedup']:.2f}x", f"{row['seconds']:.2f}"]
