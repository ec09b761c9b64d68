"""The engines: where each lives, in which precision it is run, and the calls that are timed in one process of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skipdecode import Schedule
from skipdecode.errors import UsageError

#: Beside it every other engine is timed.
BASELINE = "transformers"
SPEEDUPS = (1, 2, 3, 5)


@dataclass(frozen=True)
class Engine:
    """One program with one set of options.

    Attributes:
        program: its file in ``engines/``.
        environment: folder of ``.peers``; empty for the project's own.
        precision: that of the program; bfloat16 stands for the one of the settings.
        options: of the program; ``weights`` is the form of its converted checkpoint, where that is not the precision.
        speedups: one timed call each, in one process; layers at full depth over layers run.
        families: what it can run at all; the others are rows that say so.
    """

    program: str
    environment: str = ""
    precision: str = "bfloat16"
    options: Mapping[str, Any] = field(default_factory=dict)
    speedups: tuple[int, ...] = (1,)
    families: tuple[str, ...] = ("opt", "llama")


#: bfloat16 weights and products where nothing else is said.
ENGINES = {
    BASELINE: Engine("transformers"),
    "transformers-static": Engine("transformers", options={"cache": "static"}),
    "transformers-compiled": Engine("transformers", options={"cache": "static", "compile": True}),
    "skipdecode": Engine("skipdecode", speedups=SPEEDUPS),
    "skipdecode-prepacked": Engine("skipdecode", options={"prepack": True}, speedups=SPEEDUPS),
    "economize": Engine("economize", "economize", speedups=SPEEDUPS, families=("llama",)),
    "economize-generate": Engine(
        "economize", "economize", options={"api": "generate"}, speedups=SPEEDUPS, families=("llama",)
    ),
    "ctranslate2-float32": Engine("ctranslate2", "ctranslate2", "float32"),
    "ctranslate2-int8": Engine("ctranslate2", "ctranslate2", "int8"),
    "openvino": Engine("openvino", "openvino", options={"weights": "fp16"}),
    "openvino-int8": Engine("openvino", "openvino", options={"weights": "int8"}),
    "openvino-int8-float32": Engine("openvino", "openvino", "float32", {"weights": "int8"}),
    "vllm-eager": Engine("vllm", "vllm", options={"eager": True}),
    "vllm": Engine("vllm", "vllm"),
    "vllm-w8a8": Engine("vllm", "vllm", options={"weights": "w8a8"}),
}


def choose(names: Iterable[str]) -> list[str]:
    """Engines by name; ``all`` is every one but the baseline. Raises UsageError."""
    chosen = [each for name in names for each in (ENGINES if name == "all" else (name,))]
    for name in chosen:
        if name not in ENGINES:
            raise UsageError(f"there is no engine {name!r}: choose from all, {', '.join(ENGINES)}")
    return [name for name in dict.fromkeys(chosen) if name != BASELINE]


def python(engine: Engine, environments: Path) -> Path | None:
    """The interpreter of an engine's environment; None for the project's own. Raises UsageError if it is not there."""
    if not engine.environment:
        return None
    path = environments / engine.environment / "bin" / "python"
    if not path.exists():
        raise UsageError(f"not installed: benchmarks/peers/environments.sh {engine.environment}")
    return path


def installed(environments: Path) -> list[str]:
    """The engines whose environment is there; those of the project's own always are."""
    return [n for n, e in ENGINES.items() if not e.environment or (environments / e.environment / "installed").exists()]


def call(speedup: int, layers: int, new_tokens: int) -> dict[str, Any]:
    """Options of a timed call: nothing at full depth, else the schedule, whose depths economize can run too.

    Depths fall linearly over the new tokens, from the paper's greatest to its least, and no bottom layer is kept.
    """
    if speedup == 1:
        return {}
    schedule = Schedule.for_speedup(speedup, layers, horizon=new_tokens, warmup=0, decay="linear")
    depths = [schedule.depth(step) for step in range(new_tokens)]
    return {"schedule": schedule.replace(decay="list", depths=tuple(depths)).to_dict()}
