"""The choice with the least validation loss at its highest speed, the hardest: best.py RUN@CHOICE RUN@CHOICE …"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import typer


def loss(run: Path) -> float:
    """Validation loss of the highest speed at the end of a run; infinite if the run did not get there."""
    for state in run.glob("checkpoint-*/trainer_state.json"):
        losses: dict[float, float] = {}
        for row in json.loads(state.read_text("utf-8"))["log_history"]:
            losses |= {float(name[5:-6]): row[name] for name in row if re.fullmatch(r"eval_[\d.]+x_loss", name)}
        if losses:
            return losses[max(losses)]
    return math.inf


def main(runs: list[Path]) -> None:
    """Print the choice of the best of RUNS, and the losses of all on standard error."""
    found = {run: loss(run) for run in runs}
    for run, value in found.items():
        typer.echo(f"{run.name}: {value:.4f}", err=True)
    typer.echo(min(found, key=lambda run: found[run]).name.rpartition("@")[2])


if __name__ == "__main__":
    typer.run(main)
