"""Generation with fewer layers per token, as custom code of transformers: nothing has to be installed.

model.generate(**inputs, custom_generate=DIR, trust_remote_code=True, speedup=3)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..model.attach import attach
from ..model.config import num_layers, trained_schedules
from ..model.gate import Gate, with_cache
from ..model.inspect import gates_of
from ..schedule import choose_schedule


def generate(
    model: Any, *args: Any, speedup: float | None = None, adapter: str | Path | None = None, **kwargs: Any
) -> Any:
    """Return what ``model.generate`` returns, with positions running fewer layers as the text grows.

    Args:
        speedup: of layers, e.g. 3; 1 runs all. None: the fastest that the model or adapter was trained for.
        adapter: folder or hub name of an adapter for this model; it stays for later calls.
        args, kwargs: those of ``model.generate``. A cache among them decides what runs: an ordinary one all layers.

    Raises:
        SkipDecodeError: the model cannot skip layers exactly, or what was asked for does not fit; the message says why.
    """
    gates = gates_of(model)
    if gates is None and any(type(vars(each).get("forward")).__name__ == Gate.__name__ for each in model.modules()):
        raise UsageError(
            "the model has gates of another copy of this code, which would run beside these. Of another "
            "custom_generate: keep it, and give this folder as adapter=; or load the model again. Of the installed "
            "skipdecode: skipdecode.detach(model) first; or skipdecode.attach(model, speedup=…) without custom_generate"
        )
    acting = getattr(gates and gates.adapter, "read_from", None)  # so that it is read and compared with the model once
    attach(model, adapter=None if adapter == acting else adapter)
    if adapter is not None:
        gates_of(model).adapter.read_from = adapter
    kwargs = with_cache(
        model, choose_schedule(trained_schedules(model), num_layers(model.config), speedup), args, kwargs
    )
    # The class's method: ``from_pretrained`` may have put this function in its place on the instance.
    return type(model).generate(model, *args, **kwargs)
