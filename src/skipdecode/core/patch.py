"""Stand in for a method of one module, and find again what stands there: the one mechanism that ``detach`` undoes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn


class Patch:
    """Stands in for a method of one module instance, and remembers what it found there. Patches may stack.

    ``gates`` is the :class:`~.gate.GateState` of the model, for those that need it.
    """

    def __init__(self, module: nn.Module, name: str, gates: Any = None) -> None:
        self.gates = gates
        self.original: Callable[..., Any] = getattr(module, name)
        self.was_instance_attribute = name in vars(module)  # another patch, or accelerate's hook: to be put back
        # ``generate``, the Trainer and pipelines read signatures; annotations cannot always be pickled.
        assigned = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(cast(Any, self), self.original, assigned, updated=())


def put(kind: Callable[..., Patch], module: nn.Module, name: str, *given: Any) -> None:
    """Patch a method with ``kind(module, name, *given)``, unless one of the kind is there or the module has no such."""
    if hasattr(module, name) and not any(type(patch) is kind for _, patch in patches_on(module)):
        setattr(module, name, kind(module, name, *given))


def patches_on(module: nn.Module) -> Iterator[tuple[str, Patch]]:
    """(attribute, patch) on one module, the outer before the inner; accelerate keeps some under names of its own."""
    for name, patch in list(vars(module).items()):
        while isinstance(patch, Patch):
            yield name, patch
            patch = patch.original


def remove_patches(model: nn.Module) -> None:
    """Leave the model and its modules as they were before anything was patched."""
    for module in model.modules():
        for name, patch in list(patches_on(module)):
            # What accelerate keeps under another name is no method of the class: it has to stay there.
            if patch.was_instance_attribute or not hasattr(type(module), name):
                setattr(module, name, patch.original)
            else:
                delattr(module, name)


def gate_state(model: nn.Module) -> Any:
    """The :class:`~.gate.GateState` that the gates of a model share; None without gates."""
    patches = (patch for module in model.modules() for _, patch in patches_on(module))
    return next((state for patch in patches if (state := patch.gates) is not None), None)
