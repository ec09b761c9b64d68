"""Replace methods of module instances, find these patches again, and remove them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn


class Patch:
    """Replacement of a method of one module instance that keeps the original, which may be another patch.

    ``gates`` is the :class:`~.gate.Gates` of the model, or None if the patch does not need it.
    """

    def __init__(self, module: nn.Module, name: str, gates: Any = None) -> None:
        self.gates = gates
        self.original: Callable[..., Any] = getattr(module, name)
        self.was_instance_attribute = name in vars(module)  # another patch or accelerate's hook, to be restored
        # ``generate``, the Trainer and pipelines read the signature; annotations cannot always be pickled.
        assigned = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(cast(Any, self), self.original, assigned, updated=())


def put(kind: Callable[..., Patch], module: nn.Module, name: str, *given: Any) -> None:
    """Replace a method by ``kind(module, name, *given)``, if it exists and the module has no patch of this kind."""
    if hasattr(module, name) and not any(type(patch) is kind for _, patch in patches_on(module)):
        setattr(module, name, kind(module, name, *given))


def patches_on(module: nn.Module) -> Iterator[tuple[str, Patch]]:
    """Yield (attribute, patch) for the patches on one module, outer before inner; accelerate may rename attributes."""
    for name, patch in list(vars(module).items()):
        while isinstance(patch, Patch):
            yield name, patch
            patch = patch.original


def remove_patches(model: nn.Module) -> None:
    """Remove all patches from the model and its modules."""
    for module in model.modules():
        for name, patch in list(patches_on(module)):
            # An attribute where accelerate keeps the original is no method of the class: it must not be deleted.
            if patch.was_instance_attribute or not hasattr(type(module), name):
                setattr(module, name, patch.original)
            else:
                delattr(module, name)


def gate_state(model: nn.Module) -> Any:
    """Return the :class:`~.gate.Gates` that the gates of a model share; None if the model has no gates."""
    patches = (patch for module in model.modules() for _, patch in patches_on(module))
    return next((state for patch in patches if (state := patch.gates) is not None), None)
