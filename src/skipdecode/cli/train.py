"""``skipdecode train``: its options are the fields of a :class:`~skipdecode.training.plan.TrainingPlan`."""

from __future__ import annotations

from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from typer import Argument, Option

from ..training.options import bare_type
from ..training.plan import TrainingPlan, option_fields
from .console import say

Config = Annotated[
    Path | None,
    Option(help="Take options from this YAML or JSON file, max_steps for --max-steps; the command line's go before."),
]
NoResume = Annotated[
    bool, Option("--no-resume", help="Start anew, and remove this run's checkpoints, though OUTPUT could be resumed.")
]


def train(config: Config = None, no_resume: NoResume = False, **options: Any) -> None:
    """Train a model with the schedule on. The same command resumes after interruption.

    The result is a stock Hugging Face directory whose config carries the schedule.

    skipdecode train facebook/opt-1.3b --task e2e --data e2e --speedup 5 --output opt-e2e-5x
    """
    from ..training.run import train as run

    given = {name: value for name, value in options.items() if value is not None}
    plan = TrainingPlan.load(config, **given) if config else TrainingPlan(**given)
    run(plan, resume=not no_resume, say=say)


def _parameter(name: str) -> Parameter:
    """A field of the plan as typer has it. Its value is None if it was not given: a file may hold it."""
    kind, about = option_fields()[name]
    bare, default = bare_type(kind), getattr(TrainingPlan, name)
    shown = ",".join(default) if isinstance(default, tuple) else default
    more: dict[str, Any] = {"help": about["help"]}
    if name != "model":
        more |= {"rich_help_panel": about["group"], "show_default": str(shown) if shown else False}
    if about["choices"]:
        bare = Literal.__getitem__(about["choices"])
    elif bare in (int, float):
        more |= {"min": about["least"], "max": about["most"]}
    elif bare is not bool and get_origin(bare) is not Literal:
        bare = str  # several values have commas between
    info = Argument(**more) if name == "model" else Option(**more)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bare | None, info])


_own = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    for name, default, kind in (("config", None, Config), ("no_resume", False, NoResume))
]
_signature = Signature([*map(_parameter, option_fields()), *_own])
# typer reads both.
train.__signature__ = _signature  # type: ignore[attr-defined]
train.__annotations__ = {name: each.annotation for name, each in _signature.parameters.items()}
