"""Replace linear modules of the decoder layers and the LM head by ones that store their weights in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError, UnsupportedModel
from ..model.inspect import decoder_layers

#: Modules that are replaced: torch's linear module, and transformers' with a transposed weight.
LINEAR = (nn.Linear, Conv1D)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class DecodingLinear(nn.Module):
    """A linear module for decoding only: it cannot be saved, copied, moved, resized or trained.

    It has no ``weight`` attribute, so a model that reads weights without calling their modules fails.

    Args:
        weight: (outputs, inputs); a subclass stores it in its own form.
        bias: (outputs), or None.

    Attributes:
        option: the option of ``load`` that makes such modules, for messages.
        least_share: the least share of the layers' weights in linear modules for which the option is allowed.
    """

    option: ClassVar[str]
    least_share: ClassVar[float] = 0.0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def check_products(cls, dtype: torch.dtype) -> None:
        """Raise ModelError if torch lacks this module's kernel for ``dtype`` on this CPU."""
        raise NotImplementedError

    def check_call(self, x: Tensor) -> None:
        """Raise ModelError in training and under ``torch.autocast``, which would both give wrong results silently."""
        if x.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                f"models with {self.option} are not trained: decode under torch.no_grad(), or leave it out"
            )
        if torch.is_autocast_enabled("cpu"):
            raise ModelError(
                f"weights of {self.option} keep their type: give load the dtype you need, and leave torch.autocast out"
            )

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ModelError in place of all that would find no weight, or a second one."""
        raise ModelError(
            f"weights of {self.option} are made when a model is loaded: to save, copy, resize or change them, load "
            f"it without {self.option}"
        )

    __getstate__ = _save_to_state_dict = _load_from_state_dict = refuse

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DecodingLinear:
        moved = fn(torch.empty(0, dtype=self.dtype))
        if moved.device.type != "cpu" or moved.dtype != self.dtype:
            raise ModelError(f"weights of {self.option} keep their device and type: give load the ones you need")
        return self


def plain_linear(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield (parent, name, module) of linear modules, but not of subclasses, own forwards, hooks, computed weights."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if (
                type(child) in LINEAR
                and "forward" not in vars(child)
                and not any(getattr(child, hooks) for hooks in _HOOKS)
                and type(child.weight) is nn.Parameter
            ):
                yield parent, name, child


def check_linear(model: PreTrainedModel, kind: type[DecodingLinear]) -> None:
    """Raise UnsupportedModel if ``kind`` can replace too few of the layers' weights; on the meta device too."""
    layers = decoder_layers(model)
    every = sum(weight.numel() for weight in layers.parameters() if weight.ndim > 1)
    linear = sum(child.weight.numel() for _, _, child in plain_linear(layers))
    if not linear or linear < kind.least_share * every:
        raise UnsupportedModel(
            f"only {linear / every:.0%} of the weights in {type(model).__name__}'s layers are in linear modules "
            f"(experts are not): leave {kind.option} out"
        )


@torch.no_grad()
def replace_linear(model: PreTrainedModel, kind: type[DecodingLinear]) -> None:
    """Replace each plain linear module of the decoder layers, and the LM head, by a ``kind`` module.

    Modules are replaced one by one, so at most one weight is in memory twice. A head that is tied to the embedding
    gets its own weight. All parameters stop requiring gradients.

    Raises:
        UnsupportedModel: too few weights are in linear modules; or the model reads a weight without calling its
            module, and is then unusable.
        ModelError: the modules were replaced by another kind before.
    """
    options = {module.option for module in model.modules() if isinstance(module, DecodingLinear)}
    if options - {kind.option}:
        raise ModelError(f"the model's weights are those of {options.pop()}: load it anew for {kind.option}")
    if options:
        return
    check_linear(model, kind)
    layers, head = decoder_layers(model), model.get_output_embeddings()
    places = [(parent, name) for parent, name, _ in plain_linear(layers)]
    places += [(parent, name) for parent, name, child in plain_linear(model) if child is head]
    del head
    made: dict[int, DecodingLinear] = {}  # by id: several parents may share a module
    for parent, name in places:
        old = getattr(parent, name)
        if id(old) not in made:
            made[id(old)] = kind(old.weight.t() if isinstance(old, Conv1D) else old.weight, old.bias)
        setattr(parent, name, made[id(old)])
        del old
    model.requires_grad_(False)
    try:
        model(torch.tensor([[1, 2]], device=model.device))
    except (AttributeError, TypeError) as error:
        raise UnsupportedModel(
            f"{type(model).__name__} reads weights without calling their modules: leave {kind.option} out ({error})"
        ) from error
    one = next(iter(made.values()))
    model.save_pretrained = model.resize_token_embeddings = one.refuse
