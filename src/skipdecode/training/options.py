"""Options of a training run: describe the fields of the plan, and convert values from YAML or the command line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml

from ..errors import FileError, UsageError
from ..schedule import ORDERS, Schedule
from .checkpoints import AUTHOR

#: Default upper limit of a number; it fits in 32 bits.
ENDLESS = 2**31 - 1


def option(default: Any, help: str, group: str | None = None, *, least: float = 0, most: float = ENDLESS) -> Any:
    """Make a field of the plan with its help text, its group in the help, and its smallest and largest number."""
    return field(default=default, metadata={"help": help, "group": group, "least": least, "most": most})


def option_name(name: str) -> str:
    """Return the command line's name: ``--max-steps`` for ``max_steps``."""
    return f"--{name.replace('_', '-')}"


def bare_type(kind: Any) -> Any:
    """Return a type without None: ``int`` for ``int | None``."""
    several = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)  # Literal[…] | None is a Union
    return next(each for each in several if each is not NoneType)


def convert_value(name: str, kind: Any, value: Any, about: Mapping[str, Any]) -> Any:
    """Return an option's value as ``kind``. Raises UsageError for another, or outside ``about``'s least and most."""
    option, bare = option_name(name), bare_type(kind)
    if value is None and bare is not kind:
        return None
    if get_origin(bare) is tuple:
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
        if not items:
            _refuse(option, value, "needs values with commas between")
        return tuple(convert_value(name, get_args(bare)[0], item, about) for item in items)
    if get_origin(bare) is Literal:
        choices = get_args(bare)
        return value if value in choices else _refuse(option, value, f"takes {', '.join(choices)}")
    if bare in (int, float):
        return _number(option, bare, value, about)
    if bare is bool:
        return value if isinstance(value, bool) else _refuse(option, value, "takes true or false")
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value).strip():
        _refuse(option, value, "takes text")  # as a shell gives for a variable that is not set
    return os.fspath(value)


def _number(option: str, kind: type, value: Any, about: Mapping[str, Any]) -> Any:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # YAML reads 5e-4 as a string
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    least, most = about["least"], about["most"]
    if not least <= number <= most or (kind is int and number != int(number)):
        what = f"takes {'whole ' * (kind is int)}numbers of at least {least:g}"
        _refuse(option, value, what + f" and at most {most:g}" * (most < ENDLESS))
    return kind(number)


def _refuse(option: str, value: Any, what: str) -> NoReturn:
    raise UsageError(f"{option} {what}, not {str(value)[:100]!r}")


def read_order(value: Any) -> str | tuple[int, ...] | None:
    """Return a layer order from a name or a ranking; None stays. Raises UsageError for others."""
    if value is None or value in ORDERS:
        return value
    try:
        return convert_value("order", tuple[int, ...], value, {"least": 0, "most": 1000})
    except UsageError:
        _refuse("--order", value, f"takes {', '.join(ORDERS)}, or all layers (0,2,1,…); --schedule takes a file")


def read_schedule(value: Any) -> Schedule | None:
    """Return a schedule from itself, fields or a file; None stays. Raises UsageError, ScheduleError, FileError."""
    if value is None or isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return Schedule.from_dict(dict(value))
    if not isinstance(value, str | Path):
        _refuse("--schedule", value, "takes a schedule or its file")
    return Schedule.load(value)


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the options in a YAML or JSON file, or a run's ``training.json``. Raises FileError if it has none."""
    try:
        values = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())[:300]}") from None
    if isinstance(values, dict) and values.get("author") == AUTHOR:
        values = values.get("plan")
    if not isinstance(values, dict):
        raise FileError(f"{path} holds no options of a run: it needs lines like `max_steps: 100`")
    return values
