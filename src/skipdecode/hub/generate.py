"""Generation with fewer layers per token, as custom code of transformers: nothing has to be installed.

model.generate(**inputs, custom_generate=DIR, trust_remote_code=True, speedup=3)
"""

from pathlib import Path
from typing import Any

from ..model.attach import attach
from ..model.config import num_layers, trained_schedules
from ..model.gate import with_cache
from ..schedule import choose_schedule


def generate(
    model: Any, *args: Any, speedup: float | None = None, adapter: str | Path | None = None, **kwargs: Any
) -> Any:
    """What ``model.generate`` returns, with positions that run fewer layers.

    Args:
        speedup: target, such as 3; 1 runs all layers. None: the slowest trained speed above 1.
        adapter: folder or Hub name of an adapter for this model; it stays for later calls.
        args, kwargs: those of ``model.generate``. A cache among them decides what runs: an ordinary one all layers.

    Raises:
        SkipDecodeError: the model cannot skip layers exactly, or the options do not fit it.
    """
    attach(model, adapter=adapter)
    schedule = choose_schedule(trained_schedules(model), num_layers(model.config), speedup)
    kwargs = with_cache(model, schedule, kwargs)
    # The class's method: ``from_pretrained`` may have put this function in its place on the instance.
    return type(model).generate(model, *args, **kwargs)
