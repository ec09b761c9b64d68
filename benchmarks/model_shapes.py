"""Create models of published shapes with random weights, for timing: a pass takes as long with any weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from skipdecode.errors import ModelError, UsageError
from skipdecode.loading.device import placement
from skipdecode.loading.int8 import optimize
from skipdecode.loading.load import DEMO, load_tokenizer
from skipdecode.model.attach import attach


def _opt(layers: int, width: int, heads: int, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
        **rest,
    }


def _llama(layers: int, width: int, inner: int, heads: int, groups: int, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        **rest,
    }


#: Configs of published models by name. OPT's have 4,096 positions here, for prompts of 2,048 tokens and new tokens.
SHAPES: dict[str, dict[str, Any]] = {
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, head_dim=128),
    "tiny": _opt(8, 64, 4, vocab_size=4096),
}


def shape_config(name: str) -> Any:
    """Return the config of the model ``name`` in :data:`SHAPES`. Raises UsageError for an unknown name."""
    if name not in SHAPES:
        raise UsageError(f"there is no shape {name!r}; known are {', '.join(SHAPES)}")
    return AutoConfig.for_model(**SHAPES[name] | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})


def random_model(
    name: str,
    dtype: str = "auto",
    device: str | None = "cpu",
    attn_implementation: str | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model of a published size with random weights, and the demo's tokenizer, which decodes only some ids.

    Args:
        name: one of :data:`SHAPES`.
        dtype: dtype of the weights; ``auto``: bfloat16, as in the published models.
        device: device of the weights; None: an accelerator if there is one, else the CPU.
        attn_implementation: as :func:`skipdecode.load` takes it.
        options: ``quantization`` and ``prepack``, as :func:`skipdecode.load` takes them.

    Raises:
        UsageError: the shape is unknown.
        ModelError: there is no such device or dtype, or the memory is too small.
    """
    config = shape_config(name)
    _, device = placement(config, dtype, device)
    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device), no_init_weights():  # transformers' initialization takes a minute
            model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=attn_implementation)
            model.tie_weights()
            for parameter in model.parameters():
                parameter.data.uniform_(-0.02, 0.02)
    except (RuntimeError, MemoryError) as error:
        raise ModelError(f"{name} in {kind} does not fit on {device!r}: {error}") from error
    model.generation_config.eos_token_id = None  # so that no text ends early
    return attach(optimize(model.eval(), **options)), load_tokenizer(str(DEMO))
