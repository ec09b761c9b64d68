"""What makes layers and the head faster, whatever the schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.attach import is_attached
from ..core.gate import find_cache
from ..core.stack import decoder_layers
from ..errors import ModelError, UsageError
from .int8 import check_int8, quantize_int8
from .prepack import check_prepack
from .prepack import prepack as pack

Model = TypeVar("Model", bound=PreTrainedModel)
BOTH = "int8 weights have a layout of their own: leave one of quantization and prepack out"


def check_faster(
    name: str,
    config: Any,
    dtype: str | torch.dtype,
    device: str,
    capabilities: Mapping[str, Any],
    *,
    quantization: str | None = None,
    compile: bool = False,
    prepack: bool = False,
) -> None:
    """Whether a model may be made faster so, before its weights are read. Raises UsageError or ModelError."""
    if quantization not in (None, "int8"):
        raise UsageError(f"quantization is int8 or None, not {quantization!r}")
    if quantization and prepack:
        raise UsageError(BOTH)
    if prepack:
        check_prepack(name, config, dtype, device)
    if quantization:
        check_int8(name, config, device, capabilities)
    if compile and torch.device(device).type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise ModelError(f"compile=True needs a C++ compiler ({error}): install g++, or leave it out") from None


def faster_options(
    quantization: str | None = None, compile: bool = False, prepack: bool = False, **others: Any
) -> dict[str, Any]:
    """Those that are on, by name: what a time must be told with. Raises UsageError for ``others``."""
    if others:
        raise UsageError(f"layers are made faster by quantization, compile and prepack, not by {', '.join(others)}")
    given = {"quantization": quantization, "compile": compile, "prepack": prepack}
    return {name: value for name, value in given.items() if value}


def make_faster(
    model: Model, *, quantization: str | None = None, compile: bool = False, prepack: bool = False
) -> Model:
    """Change a model, before gates are attached, so that its layers and its head run faster. Returns the model.

    The head's input is always made contiguous (:func:`contiguous_head`).

    Args:
        model: any causal LM without gates.
        quantization: ``int8``: weights and activations of 8 bits, on CPUs (:mod:`.int8`).
        compile: decode steps through ``torch.compile``.
        prepack: weights laid out once as the CPU's products read them, instead of at every call (:mod:`.packed`).

    Raises:
        UsageError: both ``quantization`` and ``prepack``.
        ModelError: the model is attached already, its weights are offloaded, or they cannot be laid out anew.
        UnsupportedModel: int8 weights, or weights laid out anew, are not possible.
    """
    layers = decoder_layers(model)
    if is_attached(model):
        raise ModelError("gates stand on this model already: make it faster before attach, or detach it first")
    if (quantization or compile or prepack) and any(hasattr(layer, "_hf_hook") for layer in layers):
        raise ModelError("layers whose weights are offloaded can be neither compiled nor quantized nor prepacked")
    if quantization and prepack:
        raise UsageError(BOTH)
    _without_hook(model)
    if quantization:
        quantize_int8(model)
    if prepack:
        pack(model)
    if compile:
        # Else a layer's number is a constant of its graph, and each layer has graphs of its own.
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
        for layer in layers:
            if not is_compiled(layer):
                layer.forward = CompiledStep(layer)
    return contiguous_head(model)


# --- the head


def contiguous_head(model: Model) -> Model:
    """Let the LM head read the prompt's last column from memory of its own. Returns the model.

    ``generate`` hands the head a view (batch, 1, size) of all columns. In bfloat16 and float16, torch's CPU products
    then copy the head's weight once per row of the batch. In float32 nothing is changed: there the product of the view
    is another one, and bits would differ from those of the stock model.
    """
    head = model.get_output_embeddings()
    if head is not None and _contiguous not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_contiguous)
    return model


def _without_hook(model: PreTrainedModel) -> None:
    """A head with hooks is not replaced; one with ours may be."""
    hooks = getattr(model.get_output_embeddings(), "_forward_pre_hooks", {})
    for key in [key for key, hook in hooks.items() if hook is _contiguous]:
        del hooks[key]


def _contiguous(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.contiguous() if isinstance(x, Tensor) and x.element_size() < 4 else x for x in args)


# --- compiled layers


class CompiledStep:
    """Stands in for a layer's ``forward``: decode steps that carry a SkipCache are compiled, all else is as it was.

    One compiled function serves all layers: it is given the layer's own ``forward``. A copy of the model has its own.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.original: Callable[..., Any] = layer.forward
        functools.update_wrapper(
            cast(Any, self), self.original, ("__module__", "__name__", "__qualname__", "__doc__"), ()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns."""
        cache = find_cache(args, kwargs)
        # Prompts are products of large matrices, in which there is little to gain, and each length has its own.
        if cache is None or cache.width != 1 or cache.passes == 1:
            return self.original(*args, **kwargs)
        return _compiled()(self.original, *args, **kwargs)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_run, dynamic=True)


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def is_compiled(layer: nn.Module) -> bool:
    """Whether a layer's steps are compiled; below its gate too."""
    forward = layer.forward
    return isinstance(getattr(forward, "found", forward), CompiledStep) or isinstance(forward, CompiledStep)
