"""What prompts and decode steps take on one machine: measurements, and what lies between them. Pure Python.

``skipdecode profile`` measures. A pass of a model is taken for the sum of what it does outside its layers and of its
layers, each by its kind; between measured batch sizes and lengths the costs are taken to be straight lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import FileError, UsageError
from ..files import parse_json, read_json, write
from ..provenance import fingerprint
from .kv_bytes import LayerKV

#: Of the file that holds a profile.
VERSION = 1
#: A profile whose steps are further off than this is doubtful.
DOUBTFUL = 0.05
#: How far beyond the longest measured length a straight line is still believed.
FARTHEST = 1.25


@dataclass(frozen=True)
class Pass:
    """What one forward pass takes, in seconds.

    Attributes:
        batch_size: rows.
        length: positions: those of the prompt, or those that a decode step attends to.
        beyond: outside the layers: embedding, norm, head, sampling, and the loop around them.
        layers: of one layer, by its kind.
    """

    batch_size: int
    length: int
    beyond: float
    layers: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """What a model takes on a machine.

    Attributes:
        model: name of the model that was measured.
        shape: fingerprint of its config: other weights of the same shape take as long.
        machine: processor, threads and versions.
        dtype, device: that the weights had, and where they were.
        options: how the model was loaded beside that: attention and what makes layers faster.
        peaks: what the machine reached then: ``bandwidth`` (bytes/s) and ``matrix`` (operations/s), for this dtype.
        kinds: names of the kinds of layers.
        layers: kind of each layer, an index into ``kinds``.
        prompts: measured passes over prompts.
        steps: measured decode steps.
        head: share of ``beyond`` that the head (the product with the vocabulary) takes in a step, by batch size.
        kv_bytes: what each layer keeps for a row: keys, values and states.
        error: mean shares by which the profile is off: ``step``: a measured step, from what the others at that batch
            size and length say; ``step_line``, ``prompt_line``: a length, from the line between its neighbours.
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
    head: Mapping[int, float] = field(default_factory=dict)
    kv_bytes: tuple[LayerKV, ...] = ()
    error: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return len(self.layers)

    @property
    def doubt(self) -> str | None:
        """What must be said of a profile whose measurements contradict each other; None of a good one."""
        off = self.error.get("step", 0.0)
        if off <= DOUBTFUL:
            return None
        return f"the profile is off by {off:.0%}: something else computed while it was measured; measure again"

    def step(self, batch_size: int, length: int) -> Pass:
        """A decode step of so many rows that attends to ``length`` positions. Raises UsageError out of range."""
        return self._step(batch_size, length)

    def prompt(self, batch_size: int, length: int) -> Pass:
        """The pass over a prompt of ``length`` positions in each of so many rows. Raises UsageError out of range."""
        return self._prompt(batch_size, length)

    @cached_property
    def _step(self) -> Callable[[int, int], Pass]:
        return between(self.steps, "a decode step")

    @cached_property
    def _prompt(self) -> Callable[[int, int], Pass]:
        return between(self.prompts, "a prompt")

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
        """Inverse of :meth:`to_json`. Raises FileError."""
        if not isinstance(values, dict) or values.get("skipdecode_profile") != VERSION:
            raise FileError(f"this is no profile of version {VERSION}: skipdecode profile writes one")
        try:
            passes = {
                name: tuple(Pass(**one | {"layers": tuple(one["layers"])}) for one in values[name])
                for name in ("prompts", "steps")
            }
            tuples = {name: tuple(values[name]) for name in ("kinds", "layers")}
            tuples["kv_bytes"] = _kept(values["kv_bytes"], len(tuples["kinds"]), tuples["layers"])
            head = {int(batch_size): share for batch_size, share in values["head"].items()}
            known = {each.name for each in fields(cls)}
            rest = {name: value for name, value in values.items() if name in known}
            profile = cls(**rest | passes | tuples | {"head": head})
            kinds = len(profile.kinds)
            if not (profile.prompts and profile.steps and profile.layers and kinds):
                raise ValueError("it has no measurements")
            sizes = {len(one.layers) for one in (*profile.prompts, *profile.steps)}
            if sizes != {kinds} or not {*profile.layers} <= {*range(kinds)}:
                raise ValueError("its costs are not those of its kinds of layers")
            if not all(isinstance(each, dict) for each in (profile.error, profile.options, profile.peaks)):
                raise ValueError("error, options and peaks are objects")
            if not all(peak > 0 for peak in profile.peaks.values()):
                raise ValueError("a peak is above 0")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise FileError(f"the profile is damaged: {error}") from None
        return profile

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


def shape_of(config: Any) -> str:
    """A fingerprint of what decides how long a pass takes: the config without names, token ids and schedules."""
    values = config.get_text_config(decoder=True).to_dict()
    others = ("_", "architectures", "transformers_version", "dtype", "torch_dtype", "skipdecode", "use_cache")
    kept = {k: v for k, v in values.items() if not k.startswith(others) and not k.endswith("_token_id")}
    return fingerprint(kept)


def _kept(values: Sequence[Any], kinds: int, layers: Sequence[int]) -> tuple[LayerKV, ...]:
    """What each layer keeps; earlier profiles have bytes of a row and of a position by kind. Raises ValueError."""
    if values and not isinstance(values[0], Mapping):
        if len(values) != kinds:
            raise ValueError("its bytes are not those of its kinds of layers")
        by_kind = [{"fixed": float(row), "per_position": float(position)} for row, position in values]
        values = [by_kind[kind] for kind in layers]
    if len(values) not in (0, len(layers)):
        raise ValueError("its bytes are not those of its layers")
    return tuple(LayerKV(**one) for one in values)


def is_profile(data: bytes) -> bool:
    """Whether a file's bytes are a profile's, which may be replaced by another."""
    try:
        Profile.from_dict(parse_json(data, "it"))
    except FileError:
        return False
    return True


def between(passes: Sequence[Pass], what: str) -> Callable[[int, int], Pass]:
    """A function from (batch size, length) to a pass, on straight lines between the measured ones."""
    rows: dict[int, list[Pass]] = {}
    for one in sorted(passes, key=lambda one: (one.batch_size, one.length)):
        rows.setdefault(one.batch_size, []).append(one)
    sizes = sorted(rows)

    def values(batch_size: int, length: int) -> list[float]:
        measured = rows[batch_size]
        lengths = [one.length for one in measured]
        columns = zip(*((one.beyond, *one.layers) for one in measured), strict=True)
        return [_line(lengths, column, length) for column in columns]

    def at(batch_size: int, length: int) -> Pass:
        longest = max(one.length for one in passes)
        if not sizes[0] <= batch_size <= sizes[-1] or not 0 < length <= FARTHEST * longest:
            raise UsageError(
                f"the profile knows batches of {sizes[0]} to {sizes[-1]} rows and up to {int(FARTHEST * longest)} "
                f"positions: {what} of {batch_size} rows and {length} positions needs another one (skipdecode profile "
                "--batch … --context …)"
            )
        near = sorted(sizes, key=lambda size: abs(size - batch_size))[:1]
        if batch_size not in sizes:
            near = [max(s for s in sizes if s < batch_size), min(s for s in sizes if s > batch_size)]
        found = [values(size, length) for size in near]
        beyond, *layers = (_line(near, column, batch_size) for column in zip(*found, strict=True))
        return Pass(batch_size, length, beyond, tuple(layers))

    return at


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """At ``x`` of the straight lines through the points; the outer ones go on, but not below 0."""
    if len(xs) == 1:
        return ys[0]
    i = next((i for i in range(1, len(xs) - 1) if x <= xs[i]), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return max(ys[i - 1] + slope * (x - xs[i - 1]), 0.0)
