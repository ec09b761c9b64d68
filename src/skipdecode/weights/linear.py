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
    """A linear module to decode with: it cannot be saved, loaded, moved, resized or trained.

    It has no ``weight``: a family that reads a weight without calling its module fails instead of computing nonsense.

    Args:
        weight: (outputs, inputs), which a subclass keeps in its own form.
        bias: (outputs), or None.

    Attributes:
        option: the option of ``load`` that makes such modules, as a user writes it.
        least_share: of the layers' weights that must be in linear modules for it to be worth its name.
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
        """Raises ModelError where torch cannot multiply so on this CPU."""
        raise NotImplementedError

    def check_call(self, x: Tensor) -> None:
        """Raises ModelError in training and under ``torch.autocast``, which would both go wrong silently."""
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


def plain_linear(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield (parent, name, module) of each linear module that is no more: no subclass, hooks or computed weight."""
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
    """Raises UnsupportedModel where too few of the layers' weights are in linear modules. (On the meta device too.)"""
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
    """Replace each plain linear module of all layers, and the LM head, by one of the kind.

    Modules are replaced one by one, each old weight freed before the next is converted: one weight is held twice at
    most. A head that is tied to the embedding gets weights of its own. No parameter is trained from then on.

    Raises:
        UnsupportedModel: too few weights are in linear modules, or one is read without its module; in the second case
            the model cannot be used any more.
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
    made: dict[int, DecodingLinear] = {}  # a module may stand in several places
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
    model.save_pretrained, model.resize_token_embeddings = one._save_to_state_dict, one.refuse_resize
