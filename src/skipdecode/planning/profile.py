"""What prompts and decode steps take on one machine: measurements, and the lines between them. Pure Python.

``skipdecode profile`` measures them. The seconds of a pass are those of its layers, each by its kind, of its head, and
of the rest; between measured batch sizes and lengths they are taken to lie on straight lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..core.schedule import MOST_LAYERS, check_whole
from ..errors import FileError, SkipDecodeError, UsageError
from ..files import parse_json, read_json, write
from ..provenance import fingerprint

#: The version of a profile's file. Version 1 had other fields: such a profile has to be measured again.
VERSION = 2
#: A pass takes more seconds than the first and fewer than the second (a day): anything else was not measured.
LEAST_SECONDS, MOST_SECONDS = 1e-9, 86_400.0
#: Rounds that differ by more than this share make a profile doubtful.
NOISY = 0.1
#: How far beyond the longest measured length a straight line is still believed.
FARTHEST = 1.25

Made = TypeVar("Made")


@dataclass(frozen=True)
class Pass:
    """Seconds of one forward pass over the whole batch.

    Attributes:
        batch_size: rows.
        length: positions: those of the prompt, or those that a decode step attends to.
        layers: seconds of one layer, by its kind.
        rest: seconds outside layers and head: embedding, norm, sampling, and the loop around them.
        head: seconds of the product with the vocabulary.

    Raises:
        UsageError: a size that is no whole number of at least 1, or seconds that nothing can have taken.
    """

    batch_size: int
    length: int
    layers: tuple[float, ...]
    rest: float
    head: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _tuple("a pass's layers", self.layers))
        check_whole("a pass's batch_size", self.batch_size)
        check_whole("a pass's length", self.length)
        seconds = (*self.layers, self.rest, self.head)
        for value in seconds:
            _check_number("a pass's seconds", value, MOST_SECONDS)
        _need(sum(seconds) >= LEAST_SECONDS, "a pass takes some time")

    @property
    def outside_layers(self) -> float:
        """Seconds of head and rest."""
        return self.head + self.rest


@dataclass(frozen=True)
class Profile:
    """What a model takes on a machine.

    Attributes:
        model: name of the model that was measured.
        shape: fingerprint of its config: other weights of the same shape take as long.
        machine: processor, threads and versions.
        dtype, device: type and place of the weights.
        kinds: names of the kinds of layers.
        layers: kind of each layer, an index into ``kinds``.
        prompts: measured passes over prompts.
        steps: measured decode steps.
        options: how the model was loaded beside that: attention and what makes layers faster.
        noise: by how much the rounds differed, as a share: the middle one beside the fastest, on average over cells.

    Raises:
        UsageError: values that are missing, of a wrong type, or that contradict each other.
    """

    model: str
    shape: str
    machine: str
    dtype: str
    device: str
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    prompts: tuple[Pass, ...]
    steps: tuple[Pass, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kinds", "layers", "prompts", "steps"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        for text in (self.model, self.shape, self.machine, self.dtype, self.device, *self.kinds):
            _need(isinstance(text, str), f"names are texts, not {text!r}")
        _need(0 < len(self.layers) <= MOST_LAYERS, f"a model has 1 to {MOST_LAYERS} layers, not {len(self.layers)}")
        for kind in self.layers:
            check_whole("a layer's kind", kind, 0, len(self.kinds) - 1)
        for name in ("prompts", "steps"):
            passes: tuple[Pass, ...] = getattr(self, name)
            _need(bool(passes), f"{name} has no measurements")
            _need(all(isinstance(one, Pass) for one in passes), f"{name} are passes")
            _need(len({(one.batch_size, one.length) for one in passes}) == len(passes), f"{name} has a cell twice")
            _need(all(len(one.layers) == len(self.kinds) for one in passes), f"{name} has other kinds of layers")
        _need(isinstance(self.options, Mapping), "options is an object")
        _check_number("noise", self.noise, 1000)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return len(self.layers)

    @property
    def warning(self) -> str | None:
        """What must be said of a profile whose rounds differ much; None of a good one."""
        if self.noise <= NOISY:
            return None
        return f"the rounds of this profile differ by {self.noise:.0%}: something else computed; measure again"

    def step(self, batch_size: int, length: int) -> Pass:
        """A decode step of so many rows that attends to ``length`` positions. Raises UsageError out of range."""
        return _between(self._by_batch_size["steps"], batch_size, length, "a decode step")

    def prompt(self, batch_size: int, length: int) -> Pass:
        """The pass over a prompt of ``length`` positions in each of so many rows. Raises UsageError out of range."""
        return _between(self._by_batch_size["prompts"], batch_size, length, "a prompt")

    @cached_property
    def _by_batch_size(self) -> dict[str, dict[int, list[Pass]]]:
        """The measured passes, the smallest batch size first, of ascending lengths."""
        found: dict[str, dict[int, list[Pass]]] = {}
        for name, passes in (("prompts", self.prompts), ("steps", self.steps)):
            for one in sorted(passes, key=lambda one: (one.batch_size, one.length)):
                found.setdefault(name, {}).setdefault(one.batch_size, []).append(one)
        return found

    def check(self, *, machine: str | None = None, shape: str | None = None, **placed: Any) -> None:
        """Whether the profile is one of this machine, model and placement; what is None is not asked.

        Raises:
            UsageError: it is another's; the message says what differs.
        """
        for name, value in {"machine": machine, "shape": shape, **placed}.items():
            mine = getattr(self, name)
            if value is not None and value != mine:
                ours, theirs = ("this model", self.model) if name == "shape" else (value or "none", mine or "none")
                raise UsageError(
                    f"the profile is for another {name}: {theirs}, not {ours}; measure one here: skipdecode profile"
                )

    def to_json(self) -> str:
        """One JSON object, indented."""
        return json.dumps({"skipdecode_profile": VERSION} | asdict(self), indent=1)

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """Inverse of :meth:`to_json`. Raises FileError for anything that a profile cannot be."""
        if not isinstance(values, dict) or values.get("skipdecode_profile") != VERSION:
            raise FileError(f"this is no profile of version {VERSION}: skipdecode profile writes one")
        given = {name: value for name, value in values.items() if name != "skipdecode_profile"}
        try:
            for name in ("prompts", "steps"):
                given[name] = [_from_object(Pass, one, "a pass") for one in _tuple(name, given.get(name))]
            return _from_object(cls, given, "a profile")
        except SkipDecodeError as error:
            raise FileError(f"the profile is damaged: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON to ``path``, whole or not at all. Raises FileError where another kind of file is there."""
        write(path, self.to_json() + "\n", may_replace=is_profile)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that :meth:`save` wrote. Raises FileError, which names the file."""
        values = read_json(path)
        try:
            return cls.from_dict(values)
        except FileError as error:
            raise FileError(f"{path}: {error}") from None


def is_profile(data: bytes) -> bool:
    """Whether a file's bytes are a profile's, which may be replaced by another; of any version."""
    try:
        values = parse_json(data, "it")
    except FileError:
        return False
    return isinstance(values, dict) and "skipdecode_profile" in values


def shape_of(config: Any) -> str:
    """A fingerprint of what decides how long a pass takes: the config without names, token ids and schedules."""
    values = config.get_text_config(decoder=True).to_dict()
    others = ("_", "architectures", "transformers_version", "dtype", "torch_dtype", "skipdecode", "use_cache")
    return fingerprint({k: v for k, v in values.items() if not k.startswith(others) and not k.endswith("_token_id")})


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _check_number(name: str, value: Any, most: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _need(number and 0 <= value <= most, f"{name}: a number from 0 to {most:g} is needed, not {value!r}")


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    _need(isinstance(values, (list, tuple)), f"{name} is a list, not {values!r}")
    return tuple(values)


def _from_object(cls: type[Made], values: Any, what: str) -> Made:
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    _need(isinstance(values, dict) and {*values} == {*names}, f"{what} has {', '.join(names)}, and nothing else")
    return cls(**values)


def _between(measured: Mapping[int, Sequence[Pass]], batch_size: int, length: int, what: str) -> Pass:
    """The pass on the straight lines between the measured ones."""
    sizes, longest = [*measured], max(passes[-1].length for passes in measured.values())
    if not sizes[0] <= batch_size <= sizes[-1] or not 0 < length <= FARTHEST * longest:
        raise UsageError(
            f"the profile knows batches of {sizes[0]} to {sizes[-1]} rows and up to {int(FARTHEST * longest)} "
            f"positions: {what} of {batch_size} rows and {length} positions needs another one (skipdecode profile "
            "--batch … --context …)"
        )
    # The nearest measured batch size on either side; both are the same where this one was measured.
    near = sorted({max(s for s in sizes if s <= batch_size), min(s for s in sizes if s >= batch_size)})
    at_length = []
    for passes in map(measured.__getitem__, near):
        columns = zip(*((one.rest, one.head, *one.layers) for one in passes), strict=True)
        at_length.append([_line([one.length for one in passes], column, length) for column in columns])
    rest, head, *layers = (_line(near, column, batch_size) for column in zip(*at_length, strict=True))
    return Pass(batch_size, length, tuple(layers), rest, head)


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """The value at ``x`` of the straight lines through the points.

    The outer lines go on, but neither below the share of the first point that ``x`` is of it, nor below the last point.
    """
    if len(xs) == 1:
        return ys[0]
    i = next((i for i in range(1, len(xs) - 1) if x <= xs[i]), len(xs) - 1)
    y = ys[i - 1] + (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1]) * (x - xs[i - 1])
    if x < xs[0]:
        return max(y, ys[0] * x / xs[0])
    return max(y, ys[-1]) if x > xs[-1] else y
