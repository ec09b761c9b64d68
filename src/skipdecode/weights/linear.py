"""Linear modules of the layers and the LM head, replaced by ones that hold their weights in another form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.stack import decoder_layers
from ..errors import ModelError, UnsupportedModel

#: What is replaced: torch's linear module, and transformers' with a transposed weight.
LINEAR = (nn.Linear, Conv1D)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class DecodingLinear(nn.Module):
    """A linear module to decode with: it is neither saved, filled, moved, resized nor trained.

    There is no ``weight``: a family that reads a module's weight past its forward fails instead of taking it for
    another.

    Args:
        weight: (outputs, inputs), of which a subclass keeps its own form.
        bias: (outputs), or None.

    Attributes:
        option: what makes such modules, as a user writes it.
    """

    option: ClassVar[str]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def check_call(self, x: Tensor) -> None:
        """No gradient passes, and weights keep their type: both without a word, were it not for this.

        Raises ModelError: training, or ``torch.autocast``.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                f"models with {self.option} are not trained: decode under torch.no_grad(), or leave it out"
            )
        if torch.is_autocast_enabled("cpu"):
            raise ModelError(
                f"weights of {self.option} keep their type: give load the dtype you need, and leave torch.autocast out"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodingLinear:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        # oneDNN's tensors are cloned: they have no storage that deepcopy could copy.
        twin.__dict__ = {
            name: {key: None if x is None else x.clone() for key, x in value.items()}
            if name == "_buffers"
            else copy.deepcopy(value, memo)
            for name, value in vars(self).items()
        }
        return twin

    def __getstate__(self) -> NoReturn:
        raise ModelError(f"weights of {self.option} are not pickled: load the model where it is needed")

    def _save_to_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            f"weights of {self.option} are made when a model is loaded, and not saved: load it without {self.option}"
        )

    def refuse_resize(self, *_: Any, **__: Any) -> NoReturn:
        """In place of ``resize_token_embeddings``, which finds no weight, or gives a tied head one beside its own."""
        raise ModelError(
            f"weights of {self.option} keep their size: resize and save the model without {self.option}, and load that"
        )

    def _load_from_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError(f"weights of {self.option} are made when a model is loaded: load it anew with other weights")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DecodingLinear:
        moved = fn(torch.empty(0, dtype=self.dtype))
        if moved.device.type != "cpu" or moved.dtype != self.dtype:
            raise ModelError(f"weights of {self.option} keep their device and type: give load the ones you need")
        return self


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear one and no more: no subclass, no hooks, no weights that are computed."""
    return (
        type(module) in LINEAR
        and "forward" not in vars(module)
        and not any(getattr(module, name) for name in _HOOKS)
        and type(module.weight) is nn.Parameter
    )


def plain_linear(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(parent, name, module) of each plain linear module."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_plain(child):
                yield parent, name, child


def is_replaced(model: nn.Module, kind: type[DecodingLinear]) -> bool:
    """Whether modules of the kind are in place already. Raises ModelError where those of another are."""
    options = {module.option for module in model.modules() if isinstance(module, DecodingLinear)}
    if options - {kind.option}:
        raise ModelError(f"the model's weights are those of {options.pop()}: load it anew for {kind.option}")
    return bool(options)


@torch.no_grad()
def replace_linear(model: PreTrainedModel, new: type[DecodingLinear]) -> None:
    """Put a ``new`` module in the place of each plain linear module of all layers, and of the LM head.

    One after the other, each old weight freed before the next is made: one weight is held twice at most. A head that
    is tied to the embedding gets weights of its own. Nothing of the model takes part in training from then on.

    Raises:
        UnsupportedModel: a weight is read past its module. The model cannot be used any more.
    """
    layers, head = decoder_layers(model), model.get_output_embeddings()
    places = [(parent, name) for parent, name, _ in plain_linear(layers)]
    places += [(parent, name) for parent, name, child in plain_linear(model) if child is head]
    del head
    made: dict[int, DecodingLinear] = {}  # a module may stand in several places
    for parent, name in places:
        old = getattr(parent, name)
        if id(old) not in made:
            made[id(old)] = new(old.weight.t() if isinstance(old, Conv1D) else old.weight, old.bias)
        setattr(parent, name, made[id(old)])
        del old
    model.requires_grad_(False)
    try:
        model(torch.tensor([[1, 2]], device=model.device))
    except (AttributeError, TypeError) as error:
        name = type(model).__name__
        raise UnsupportedModel(
            f"{name} reads its weights past their modules: leave {new.option} out ({error})"
        ) from error

    one = next(iter(made.values()))
    model.save_pretrained, model.resize_token_embeddings = one._save_to_state_dict, one.refuse_resize
