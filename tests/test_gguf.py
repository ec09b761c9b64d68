"""A GGUF file is a MODEL wherever transformers reads it, and refused by name where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import skipdecode
from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode.data.tokenize import train_tokenizer
from skipdecode.errors import MissingExtra, UsageError
from skipdecode.generation import vllm
from skipdecode.generation.job import GenerationJob
from skipdecode.loading import load as loading
from skipdecode.serving.server import server_command

#: Names of a layer's weights in transformers, and in a GGUF file of type Llama.
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def halves_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in GGUF's order: those that RoPE turns together stand side by side."""
    rows, size = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, size).swapaxes(1, 2).reshape(rows, size)


@pytest.fixture(scope="module")
def original() -> PreTrainedModel:
    """A tiny Llama with grouped heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def file(original: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as a GGUF file in float32, with a BPE tokenizer."""
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf: pip install 'skipdecode[gguf]'")
    path, config = tmp_path_factory.mktemp("gguf") / "tiny.gguf", original.config
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    model = tokenizer.backend_tokenizer.to_str()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary] + [f"<unused{i}>" for i in range(320 - len(vocabulary))]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    merges = json.loads(model)["model"]["merges"]
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in merges])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    state = original.state_dict()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        writer.add_tensor(f"{theirs}.weight", state[f"{ours}.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            weight = halves_together(weight, heads[theirs]) if theirs in heads else weight
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_its_model_is_the_original_and_can_be_saved(file: Path, original: PreTrainedModel, tmp_path: Path) -> None:
    """Weights to the bit, as floats; what stands beside the file is another model's."""
    (file.parent / "generation_config.json").write_text('{"do_sample": "never"}')
    model, tokenizer = skipdecode.load(str(file), dtype="float32", device="cpu")
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in original.state_dict().items())
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = skipdecode.load(str(tmp_path), device="cpu")
    found = [
        skipdecode.generate(each, tokenizer, TEXTS[:3], speedup=2, max_new_tokens=6, eos_token_id=-1).completions
        for each in (model, again)
    ]
    assert found[0] == found[1]


def test_a_file_is_taught_to_skip(file: Path, tmp_path: Path) -> None:
    """Its adapter knows it again, and skips from the folder alone; `probe` takes it too."""
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS])
    small = ["--prompts", prompts, "--max-new-tokens", 8]
    done = run("probe", file, "--texts", 8, "--speedups", 2, *small)
    assert done.returncode == 0, done.stderr
    few = ["--own-texts", 20, "--speedups", 2, "--max-steps", 2, "--adapter-rank", 4]
    done = run("train", file, *few, "--output", tmp_path / "fast", *small)
    assert done.returncode == 0, done.stderr
    model, tokenizer = skipdecode.load(str(tmp_path / "fast"))
    result = skipdecode.generate(model, tokenizer, TEXTS[:2], speedup=2, max_new_tokens=6, eos_token_id=-1)
    assert result.stats.layer_ratio == 2


def test_a_job_of_a_file_goes_on_only_with_the_same_file(file: Path, tmp_path: Path) -> None:
    """Its place, size and time are part of what a job is; its texts are those of the loaded model."""
    options: dict[str, Any] = {"max_new_tokens": 8}
    result = GenerationJob(str(file), TEXTS[:2], tmp_path / "out.jsonl", device="cpu", speedup=2, options=options).run()
    loaded = skipdecode.load(str(file), device="cpu")
    assert result.texts == [r.text for r in skipdecode.generate(*loaded, TEXTS[:2], speedup=2, **options).completions]
    before = loading.identity_of(str(file))
    assert loading.identity_of(str(file)) == before
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(file.read_bytes())
    assert loading.identity_of(str(copy)) != before


def test_it_is_refused_where_transformers_does_not_read_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server, the engine and offloading; without the package, with the command that installs it."""
    with pytest.raises(UsageError, match="the server reads no GGUF file"):
        server_command(str(file))
    monkeypatch.setattr(vllm, "require_vllm", lambda: None)
    with pytest.raises(UsageError, match="the engine vllm reads no GGUF file"):
        GenerationJob(str(file), TEXTS[:1], engine=vllm.VllmEngine()).run()
    with pytest.raises(UsageError, match="offloading reads no GGUF file"):
        skipdecode.load(str(file), offload="cpu")
    monkeypatch.setattr(loading, "is_gguf_available", lambda: False)
    with pytest.raises(MissingExtra, match=r"skipdecode\[gguf\]"):
        loading.read_config(str(file))
