"""``skipdecode train``: its options are the fields of a :class:`~skipdecode.training.config.TrainingPlan`."""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from typer import Argument, Option

from ..training.config import TrainingPlan, option_fields
from ..training.options import bare_type, option_name
from .console import say

Config = Annotated[
    Path | None,
    Option(help="YAML or JSON file of options, e.g. max_steps: 100. Options given here go before the file's."),
]
NoResume = Annotated[
    bool, Option("--no-resume", help="Start anew: remove the run's checkpoints in OUTPUT instead of resuming.")
]


def train(
    config: Config = None,
    no_resume: NoResume = False,
    **options: Any,
) -> None:
    """Fine-tune a model so that it writes well with layers skipped. The same command resumes after interruption.

    With --own-texts the model writes what is learnt from. By default it then stays as it is, and OUTPUT is an adapter
    of some megabytes; else OUTPUT is a stock Hugging Face directory whose config carries the schedule.

    skipdecode train HuggingFaceTB/SmolLM2-135M-Instruct --own-texts 4000 --speedups 1.5,2 --output fast

    skipdecode train facebook/opt-1.3b --task e2e --data e2e --speedup 5 --output opt-e2e-5x
    """
    from ..training.train import train as run

    given = {name: value for name, value in options.items() if value is not None}
    plan = TrainingPlan.load(config, **given) if config else TrainingPlan(**given)
    run(plan, resume=not no_resume, say=say)


def _parameter(name: str) -> Parameter:
    """Return a field of the plan as a parameter for typer; its value reaches the plan as typed."""
    kind, about = option_fields()[name]
    bare, default = bare_type(kind), getattr(TrainingPlan, name)
    text, metavar = about["help"], bare.__name__ if bare in (int, float) else None
    if get_origin(bare) is Literal:
        text, metavar = f"{text} One of {', '.join(get_args(bare))}.", "name"
    if default is not None and default is not False:
        text = f"{text.removesuffix('.')} (default: {','.join(default) if isinstance(default, tuple) else default})."
    if name == "model":
        info = Argument(metavar="MODEL", help=text)
    else:
        # --no-… takes much room, and is needed only where neither is the default.
        undecided = f"/--no-{name.replace('_', '-')}" if default is None else ""
        flag = (option_name(name) + undecided,) if bare is bool else ()
        info = Option(*flag, metavar=metavar, help=text, rich_help_panel=about["group"])
    kept = bool if bare is bool else str
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kept | None, info])


# typer reads the signature and the annotations.
_fixed = [each for each in signature(train, eval_str=True).parameters.values() if each.name != "options"]
_all = [_fixed[0], *map(_parameter, option_fields()), *_fixed[1:]]
vars(train)["__signature__"] = Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in _all])
train.__annotations__ = {each.name: each.annotation for each in _all}
