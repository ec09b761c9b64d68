"""Measured seconds of prompts and decode steps on one machine, and interpolation between them.

``skipdecode profile`` measures them. The seconds of a pass are those of its layers, by kind, of its head, and of the
rest; each is interpolated linearly between measured batch sizes and lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import FileError, ScheduleError, UsageError
from ..files import has_key, read_json, write
from ..loading.device import machine, placement
from ..provenance import fingerprint

#: Version of the file format. Version 1 had other fields, so such a profile has to be measured again.
VERSION = 2
#: Bounds on the seconds of a pass (the upper one is a day): values outside cannot have been measured.
LEAST_SECONDS, MOST_SECONDS = 1e-9, 86_400.0
#: A profile with more ``noise`` than this gets a warning.
NOISY = 0.1
#: Lengths are extrapolated up to this multiple of the longest measured one.
FARTHEST = 1.25
#: Whether a file's bytes are a profile of any version, so that another profile may replace the file.
is_profile = has_key("skipdecode_profile")


@dataclass(frozen=True)
class Pass:
    """Seconds of one forward pass over the whole batch.

    Attributes:
        batch_size: number of sequences.
        length: number of positions in the prompt, or that a decode step attends to.
        layers: seconds of one layer of each kind.
        rest: seconds outside layers and head: embedding, norm, sampling, and the generation loop.
        head: seconds of the output projection to the vocabulary.

    Raises:
        UsageError: a size is no whole number of at least 1, or no pass can take these seconds.
    """

    batch_size: int
    length: int
    layers: tuple[float, ...]
    rest: float
    head: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        seconds = (*self.layers, self.rest, self.head)
        for value in seconds:
            _check_number("a pass's seconds", value, MOST_SECONDS)
        _need(sum(seconds) >= LEAST_SECONDS, "a pass takes some time")

    @property
    def outside_layers(self) -> float:
        """Return the seconds of head and rest."""
        return self.head + self.rest


@dataclass(frozen=True)
class Profile:
    """Measured seconds of a model on a machine.

    Attributes:
        model: name of the model that was measured.
        shape: fingerprint of the model's config: other weights of the same shape take as long.
        machine: processor, threads and versions.
        dtype, device: type and place of the weights.
        kinds: names of the kinds of layers.
        layers: kind of each layer, an index into ``kinds``.
        prompts: measured passes over prompts.
        steps: measured decode steps.
        options: other settings with which the model was loaded, such as the attention implementation.
        noise: by what share the median of repeated measurements exceeds the fastest, averaged over all measured sizes.

    Raises:
        UsageError: values are out of range, or contradict each other.
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
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for text in (self.model, self.shape, self.machine, self.dtype, self.device, *self.kinds):
            _need(isinstance(text, str), f"names are texts, not {text!r}")
        for name in ("prompts", "steps"):
            passes: tuple[Pass, ...] = getattr(self, name)
            _need(bool(passes), f"{name} has no measurements")
            _need(len({(one.batch_size, one.length) for one in passes}) == len(passes), f"{name} has a cell twice")
            _need(all(len(one.layers) == len(self.kinds) for one in passes), f"{name} has other kinds of layers")
        _check_number("noise", self.noise, 1000)

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers of the model."""
        return len(self.layers)

    @property
    def warning(self) -> str | None:
        """Return a warning if repeated measurements differ by more than :data:`NOISY`, else None."""
        if self.noise <= NOISY:
            return None
        return f"the rounds of this profile differ by {self.noise:.0%}: something else computed; measure again"

    def step(self, batch_size: int, length: int) -> Pass:
        """Predict a decode step over ``length`` positions per row. Raises UsageError beyond what was measured."""
        return _between(self._by_batch_size["steps"], batch_size, length, "a decode step")

    def prompt(self, batch_size: int, length: int) -> Pass:
        """Predict the pass over prompts of ``length`` positions. Raises UsageError beyond what was measured."""
        return _between(self._by_batch_size["prompts"], batch_size, length, "a prompt")

    @cached_property
    def _by_batch_size(self) -> dict[str, dict[int, list[Pass]]]:
        """Group the passes of ``prompts`` and of ``steps`` by batch size, in ascending order of size and length."""
        found: dict[str, dict[int, list[Pass]]] = {"prompts": {}, "steps": {}}
        for name, passes in found.items():
            for one in sorted(getattr(self, name), key=lambda one: (one.batch_size, one.length)):
                passes.setdefault(one.batch_size, []).append(one)
        return found

    def check(self, *, machine: str | None = None, shape: str | None = None, **placed: Any) -> None:
        """Raise UsageError if the machine, shape, dtype, device or options differ from these (None: any)."""
        for name, value in {"machine": machine, "shape": shape, **placed}.items():
            mine = getattr(self, name)
            if value is not None and value != mine:
                ours, theirs = ("this model", self.model) if name == "shape" else (value or "none", mine or "none")
                raise UsageError(
                    f"the profile is for another {name}: {theirs}, not {ours}; measure one here: skipdecode profile"
                )

    def to_json(self) -> str:
        """Return the profile as an indented JSON object."""
        return json.dumps({"skipdecode_profile": VERSION} | asdict(self), indent=1)

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """Make the profile that :meth:`to_json` wrote, from its JSON values. Raises FileError for other values."""
        if not isinstance(values, dict) or values.get("skipdecode_profile") != VERSION:
            raise FileError(f"this is no profile of version {VERSION}: skipdecode profile writes one")
        given = {name: value for name, value in values.items() if name != "skipdecode_profile"}
        try:
            passes = {name: [Pass(**one) for one in given[name]] for name in ("prompts", "steps")}
            return cls(**given | passes)
        except (KeyError, TypeError, UsageError, ScheduleError) as error:
            raise FileError(f"the profile is damaged: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON to ``path``, all or nothing. Raises FileError if ``path`` is a file but no profile."""
        write(path, self.to_json() + "\n", may_replace=is_profile)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that :meth:`save` wrote. Raises FileError, which names the file."""
        values = read_json(path)
        try:
            return cls.from_dict(values)
        except FileError as error:
            raise FileError(f"{path}: {error}") from None


def shape_of(config: Any) -> str:
    """Return a fingerprint of what decides how long a pass takes: the config without names, token ids and schedules."""
    values = config.get_text_config(decoder=True).to_dict()
    others = ("_", "architectures", "transformers_version", "dtype", "torch_dtype", "skipdecode", "use_cache")
    return fingerprint({k: v for k, v in values.items() if not k.startswith(others) and not k.endswith("_token_id")})


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _check_number(name: str, value: Any, most: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _need(number and 0 <= value <= most, f"{name}: a number from 0 to {most:g} is needed, not {value!r}")


def _between(measured: Mapping[int, Sequence[Pass]], batch_size: int, length: int, what: str) -> Pass:
    """Interpolate between passes measured at several batch sizes. Raises UsageError, naming ``what``, beyond them."""
    sizes, longest = [*measured], max(passes[-1].length for passes in measured.values())
    if not sizes[0] <= batch_size <= sizes[-1] or not 0 < length <= FARTHEST * longest:
        raise UsageError(
            f"the profile knows batches of {sizes[0]} to {sizes[-1]} rows and up to {int(FARTHEST * longest)} "
            f"positions: {what} of {batch_size} rows and {length} positions needs another one (skipdecode profile "
            "--batch … --context …)"
        )
    # The nearest measured batch sizes on either side, or this one alone if it was measured.
    near = sorted({max(s for s in sizes if s <= batch_size), min(s for s in sizes if s >= batch_size)})
    at_length = []
    for passes in map(measured.__getitem__, near):
        columns = zip(*((one.rest, one.head, *one.layers) for one in passes), strict=True)
        at_length.append([_line([one.length for one in passes], column, length) for column in columns])
    rest, head, *layers = (_line(near, column, batch_size) for column in zip(*at_length, strict=True))
    return Pass(batch_size, length, tuple(layers), rest, head)


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Interpolate the points (``xs``, ``ys``) linearly at ``x``, or extrapolate the outer lines.

    Below the first point the value is at least proportional to ``x``; above the last it is at least the last one.
    """
    if len(xs) == 1:
        return ys[0]
    i = next((i for i in range(1, len(xs) - 1) if x <= xs[i]), len(xs) - 1)
    y = ys[i - 1] + (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1]) * (x - xs[i - 1])
    if x < xs[0]:
        return max(y, ys[0] * x / xs[0])
    return max(y, ys[-1]) if x > xs[-1] else y


def check_profile(
    profile: Profile, config: Any, dtype: str = "auto", device: str | None = None, **options: Any
) -> None:
    """Check that a profile was measured on this machine, for this config, dtype, device and loading options.

    Raises:
        UsageError: something differs; the message says what.
        ModelError: the device does not exist.
    """
    kind, place = placement(config, dtype, device)
    kind = config.dtype if kind == "auto" else kind  # None: only the weights tell
    profile.check(
        shape=shape_of(config),
        machine=machine(place),
        device=torch.device(place).type,
        dtype=None if kind is None else str(kind).removeprefix("torch."),
        options=options,
    )
