"""``skipdecode train``: its options are the fields of a :class:`~skipdecode.training.plan.TrainingPlan`."""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from typer import Argument, Context, Option

from ..training.options import ENDLESS, bare_type, option_name
from ..training.plan import TrainingPlan, option_fields
from . import options as shared
from .console import say

Config = Annotated[
    Path | None,
    Option(help="YAML or JSON file of options, e.g. max_steps: 100. Options given here go before the file's."),
]
#: Options that other commands have too.
SHARED: dict[str, Any] = {
    "data": shared.Data,
    "task": shared.Task,
    "prompt_column": shared.PromptColumn,
    "response_column": shared.ResponseColumn,
    "prompt_share": shared.PromptShare,
    "max_source_words": shared.MaxSourceWords,
}
NoResume = Annotated[
    bool, Option("--no-resume", help="Start anew: remove the run's checkpoints in OUTPUT instead of resuming.")
]


def train(
    context: Context,
    config: Config = None,
    no_resume: NoResume = False,
    **options: Any,
) -> None:
    """Fine-tune a model so that it writes well with layers skipped. The same command resumes after interruption.

    The result is a stock Hugging Face directory whose config carries the schedule.

    skipdecode train facebook/opt-1.3b --task e2e --data e2e --speedup 5 --output opt-e2e-5x
    """
    from ..training.run import train as run

    source = context.get_parameter_source
    given = {name: value for name, value in options.items() if getattr(source(name), "name", "DEFAULT") != "DEFAULT"}
    plan = TrainingPlan.load(config, **given) if config else TrainingPlan(**given)
    run(plan, resume=not no_resume, say=say)


def _parameter(name: str) -> Parameter:
    """Return a field of the plan as a parameter for typer; a tuple becomes one comma-separated string."""
    kind, about = option_fields()[name]
    bare, default = bare_type(kind), getattr(TrainingPlan, name)
    if name in SHARED:
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=SHARED[name])
    more: dict[str, Any] = {"help": about["help"]}
    several = get_args(bare) if get_origin(bare) is Literal else about["choices"]
    if len(several) > 5:  # too long for a column, which would break the names
        more |= {"metavar": "name", "help": f"{about['help']} One of {', '.join(several)}."}
    if about["choices"]:
        bare = Literal.__getitem__(about["choices"])
    elif bare in (int, float):
        most = about["most"] if about["most"] < ENDLESS else None
        more |= {"min": about["least"], "max": most, "metavar": bare.__name__}
    elif bare is not bool and get_origin(bare) is not Literal:
        bare = str
    if isinstance(default, tuple):
        default = ",".join(default)
    if name == "model":
        info = Argument(metavar="MODEL", show_default=False, **more)
    else:
        flag = (option_name(name),) if bare is bool else ()  # no --no-…, which takes too much room
        info = Option(*flag, rich_help_panel=about["group"], show_default=default is not False, **more)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[bare | None, info])


# typer reads the signature and the annotations.
_fixed = [each for each in signature(train, eval_str=True).parameters.values() if each.name != "options"]
_all = [*_fixed[:2], *map(_parameter, option_fields()), *_fixed[2:]]  # context and --config come first
vars(train)["__signature__"] = Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in _all])
train.__annotations__ = {each.name: each.annotation for each in _all}
