"""Make layers faster at any depth: int8 or prepacked linear modules, and a contiguous input for the LM head."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelError, UsageError
from ..model.inspect import decoder_layers
from ..model.patch import gate_state
from .int8 import Int8Linear
from .linear import DecodingLinear, replace_linear
from .prepack import PackedLinear

Model = TypeVar("Model", bound=PreTrainedModel)


def optimizations(quantization: str | None = None, prepack: bool = False) -> dict[str, Any]:
    """Return those of the two options that are on, by name. Raises UsageError for an unknown quantization, or both."""
    if quantization not in (None, "int8"):
        raise UsageError(f"quantization is int8 or None, not {quantization!r}")
    if quantization and prepack:
        raise UsageError("int8 weights have a layout of their own: leave one of quantization and prepack out")
    given = {"quantization": quantization, "prepack": prepack}
    return {name: value for name, value in given.items() if value}


def linear_kind(**options: Any) -> type[DecodingLinear] | None:
    """Return the class that replaces linear modules under these options of :func:`optimize`; None if none is on."""
    given = optimizations(**options)
    return Int8Linear if "quantization" in given else PackedLinear if given else None


def check_optimizations(name: str, config: Any, dtype: str | torch.dtype, device: str, **options: Any) -> None:
    """Check, before weights are read, that a model's linear modules can be replaced on this machine.

    Args:
        name: the model's name, for messages.
        dtype: dtype of the weights; ``auto`` is the config's.
        options: as :func:`optimizations` takes them.

    Raises:
        UsageError: as :func:`optimizations`.
        ModelError: the device is no CPU, the checkpoint is quantized, or torch lacks the kernels for this CPU.
    """
    if (kind := linear_kind(**options)) is None:
        return
    if torch.device(device).type != "cpu":
        raise ModelError(f"{kind.option} is for CPUs, not {device!r}: leave it out")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{name} is quantized already: leave {kind.option} out")
    kind.check_products(config.dtype if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def optimize(model: Model, *, quantization: str | None = None, prepack: bool = False) -> Model:
    """Make a model's layers and LM head run faster, in place, and return it.

    The 16-bit inputs of the head are always made contiguous. ``generate`` passes it a view (batch, 1, size) of the
    hidden states of all prompt positions, for which torch's CPU kernels copy the head's weight once per sequence. (In
    float32 the view stays: contiguous inputs would use another kernel, whose bits differ from the stock model's.)
    With ``quantization`` or ``prepack``, the model can decode, but be neither saved nor trained.

    Args:
        model: any causal LM without gates.
        quantization: ``int8``: weights and activations of 8 bits, on CPUs (:mod:`.int8`).
        prepack: convert weights to the layout of the CPU's kernels once, instead of at every call (:mod:`.prepack`).

    Raises:
        UsageError: an unknown ``quantization``, or both ``quantization`` and ``prepack``.
        ModelError: the model has gates already, its weights are offloaded, or torch lacks the kernels for this CPU.
        UnsupportedModel: too few weights are in linear modules, or the model reads them without calling the modules.
    """
    if gate_state(model) is not None:
        raise ModelError("the model has gates already: optimize it before attach, or detach it first")
    given = optimizations(quantization, prepack)
    if (kind := linear_kind(**given)) is not None:
        if any(hasattr(layer, "_hf_hook") for layer in decoder_layers(model)):
            raise ModelError(f"layers whose weights are offloaded take no {kind.option}")
        check_optimizations(type(model).__name__, model.config, model.dtype, str(model.device), **given)
        hooks = getattr(model.get_output_embeddings(), "_forward_pre_hooks", {})
        for key in [key for key, hook in hooks.items() if hook is _contiguous]:
            del hooks[key]  # heads with hooks are not replaced
        replace_linear(model, kind)
    head = model.get_output_embeddings()
    if head is not None and _contiguous not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_contiguous)
    return model


def _contiguous(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.contiguous() if isinstance(x, Tensor) and x.element_size() < 4 else x for x in args)
