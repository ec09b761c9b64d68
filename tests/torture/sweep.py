"""``skipdecode check`` on a tiny random model of every causal LM type that transformers has and a small config makes.

    python tests/torture/sweep.py [TYPE …]

Not a test: what a type needs beside small sizes (lists per layer, widths that must fit each other) is not known here,
so that some are not built. Prints what held for each, and the counts.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import warnings
from collections import Counter
from typing import Any, NoReturn

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from skipdecode import Schedule
from skipdecode.evaluation.exactness import run_checks
from skipdecode.model.inspect import text_config

LAYERS = 8
SECONDS = 60
#: Sizes by the names that configs have for them.
SMALL: dict[int, str] = {
    128: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size d_model n_embd word_embed_proj_dim",
    LAYERS: "num_hidden_layers n_layer num_layers n_layers decoder_layers mamba_n_heads mamba_d_head mamba_d_state "
    "mamba_num_heads mamba_head_dim ssm_state_size state_size linear_key_head_dim linear_value_head_dim v_head_dim "
    "hidden_size_per_layer_input query_pre_attn_scalar",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_key_value_heads qk_rope_head_dim "
    "qk_nope_head_dim num_local_experts num_experts n_routed_experts mamba_chunk_size chunk_size mamba_d_conv "
    "conv_kernel time_step_rank mamba_dt_rank linear_num_value_heads laurel_rank rotary_dim",
    48: "intermediate_size ffn_dim n_inner decoder_ffn_dim",
    64: "max_position_embeddings n_positions mamba_d_ssm",
    16: "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank",
    2: "num_experts_per_tok linear_num_key_heads n_group mamba_expand expand",
    1: "topk_group n_shared_experts first_k_dense_replace n_groups mamba_n_groups bos_token_id",
}
VALUES: dict[str, Any] = {name: size for size, names in SMALL.items() for name in names.split()}
VALUES |= dict.fromkeys("dropout attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop".split(), 0.0)
VALUES |= {"pad_token_id": 0}


def build(kind: str) -> PreTrainedModel:
    """A model of the type with small sizes, and weights large enough for every layer to matter."""
    config_class: Any = CONFIG_MAPPING[kind]
    default = config_class()
    if text_config(default) is not default:
        raise ValueError("has parts beside a decoder")
    known = default.to_dict() | dict.fromkeys(getattr(default, "attribute_map", {}), 0)
    values: dict[str, Any] = {name: value for name, value in VALUES.items() if name in known}
    values |= {"eos_token_id": None}
    if known.get("sliding_window"):
        values["sliding_window"] = 6
    if known.get("head_dim"):
        values["head_dim"] = 4 if "qk_rope_head_dim" in known else 8
    config = config_class(**values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1) if parameter.ndim < 2 else parameter.copy_(0.15 * noise)
    return model


def verdict(kind: str) -> str:
    """``holds``, ``refused: …``, ``fails: …`` or ``not built: …``."""
    try:
        model = build(kind)
        layers = text_config(model.config).num_hidden_layers
        schedule = Schedule(layers, layers - 2, 2, horizon=8)
    except Exception as error:  # what its code raises for sizes that do not fit
        return f"not built: {type(error).__name__} {str(error).splitlines()[0][:80] if str(error) else ''}"
    findings = list(run_checks(model, schedule))
    failed = [finding for finding in findings if not finding.held]
    if not failed:
        return "holds"
    if len(findings) == 1:
        return f"refused: {failed[0].detail}"
    return "fails: " + "; ".join(f"{finding.claim}: {finding.detail}" for finding in failed)[:300]


def main(kinds: list[str]) -> None:
    """One line a type, then the counts."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def late(*_: object) -> NoReturn:
        raise TimeoutError(f"over {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    counts: Counter[str] = Counter()
    for kind in kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        signal.alarm(SECONDS)
        said = "not built: took too long"
        with contextlib.suppress(TimeoutError):
            said = verdict(kind)
        signal.alarm(0)
        counts[said.partition(":")[0]] += 1
        print(f"{kind:28s} {said}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
