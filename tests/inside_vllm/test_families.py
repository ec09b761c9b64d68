"""One gate serves every family: native layers of vLLM, those of its Transformers backend, with an adapter or without.

Tokens are those of our own ``generate``, log-probabilities those of teacher forcing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import skipdecode
from helpers.engine import Reference, Request, check_layers, engine, requests_of, runner, serve
from helpers.tiny import train_tokenizer
from skipdecode import Schedule, teacher_forced
from skipdecode.errors import ModelError
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.model.config import to_config_entry
from skipdecode.model.inspect import text_config
from skipdecode.model.lora import linear_sizes

NEW = 24
SIZES = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "max_model_len": 96}
#: Without an adapter, whose modules take the place of some of what gates do.
PLAIN = ["llama", "llama by transformers", "mixtral compiled", "gemma3_text compiled"]
LAYERS = 6
#: Depths that fall, a layer 0 that some skip, prompts of their own depth and decay: whatever a schedule can be.
SCHEDULES = {
    1.0: Schedule.full(LAYERS),
    2.0: Schedule(LAYERS, 4, 2, horizon=8),
    3.0: Schedule(LAYERS, 2, 1, horizon=4, order=(3, 5, 1, 0, 2, 4), prompt_layers=4, warmup=0),
    4.0: Schedule(LAYERS, 2, 1, horizon=6, order="even", prompt_decay=3, warmup=0),
}
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3}
#: Fields of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama by transformers": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma3_text": WINDOWS,
    "gpt_neox": {"num_key_value_heads": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"sliding_window": 16},
    "phi3": {},
    "gpt2": {"n_inner": 96},
    "cohere": {},
    "exaone4": WINDOWS,
    "gemma4_text": WINDOWS
    | {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@dataclass
class Case:
    """A checkpoint and its adapter, requests, and what ``generate`` and teacher forcing say: without it and with it."""

    folder: Path
    adapter: Path
    requests: list[Request]
    texts: list[list[tuple[int, ...]]]
    logprobs: list[list[torch.Tensor]]

    def engine(self, adapter: bool, **options: Any) -> Any:
        """An engine of all speeds."""
        settings = {"speedups": [*SCHEDULES]} | ({"adapter": str(self.adapter)} if adapter else {})
        return engine(self.folder, settings, **options)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """In a process of their own: vLLM's Transformers backend changes transformers' classes for good."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(references, {name: tmp_path_factory.mktemp("family") for name in FAMILIES}).result()


def references(folders: Mapping[str, Path]) -> dict[str, Case]:
    """A case of each family, in the family's folder."""
    source = random.Random(0)
    prompts = [tuple(source.choices(range(2, 256), k=source.randint(1, 40))) for _ in range(40)]
    requests = requests_of(prompts, 48, seed=0, speedups=[*SCHEDULES], most=NEW)
    found = {}
    for name, folder in folders.items():
        base = checkpoint(name, folder / "base")
        adapter = random_adapter(folder / "adapter", base)
        texts, logprobs = [], []
        for path in (base, adapter):
            reference = Reference(path, most_new=NEW)
            texts.append(reference.texts(requests))
            rows = zip(requests, texts[-1], strict=True)
            logprobs.append([forced(reference, request, text) for request, text in rows])
        assert texts[0] != texts[1]
        found[name] = Case(base, adapter, requests, texts, logprobs)
    return found


def checkpoint(name: str, folder: Path) -> Path:
    """Random weights with the schedules above in their config."""
    tokenizer = train_tokenizer(["the cat sat on the mat"], vocab_size=300)
    kind = CONFIG_MAPPING[name.split()[0]]
    torch.manual_seed(0)
    config = kind(
        **(COMMON | FAMILIES[name]), vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=1
    )
    config.skipdecode = to_config_entry(SCHEDULES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # wide enough that two tokens are seldom nearly tied
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_adapter(folder: Path, base: Path) -> Path:
    """An adapter with random weights, which change hidden states much."""
    model, _ = skipdecode.load(str(base), dtype="float32")
    adapter = Adapter(text_config(model.config).hidden_size, 4, SCHEDULES, linear_sizes(model), 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    save_adapter(folder, adapter, model, str(base))
    return folder


@torch.no_grad()
def forced(reference: Reference, request: Request, text: tuple[int, ...]) -> torch.Tensor:
    """The log-probability of each new token in one pass over the whole text."""
    ids = torch.tensor([[*request.prompt, *text]])
    with teacher_forced(reference.model, SCHEDULES[request.speedup], len(request.prompt)):
        logits = reference.model(input_ids=ids, use_cache=False).logits
    logprobs = logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(text)[:, None])[:, 0]


def check(case: Case, name: str, adapter: bool) -> None:
    """All schedules in one batch, chunks of prompts between them."""
    implementation = "transformers" if name.endswith("by transformers") else "auto"
    eager = not name.endswith("compiled")
    with case.engine(adapter, model_impl=implementation, enforce_eager=eager, **SIZES) as made:
        served = serve(made, case.requests, arrive=lambda step: 1 + step % 2, logprobs=1)
        check_layers(made)
    expected = case.texts[adapter]
    assert not [place for place, text in enumerate(expected) if served.tokens[place] != text]
    for place, logprobs in enumerate(case.logprobs[adapter]):
        torch.testing.assert_close(torch.tensor(served.logprobs[place]), logprobs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", PLAIN)
def test_each_request_follows_its_own_schedule(name: str, cases: dict[str, Case]) -> None:
    check(cases[name.removesuffix(" compiled")], name, adapter=False)


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3 compiled"])
def test_each_request_gets_its_own_speeds_adapter(name: str, cases: dict[str, Case]) -> None:
    check(cases[name.removesuffix(" compiled")], name, adapter=True)


def test_with_an_adapter_1x_is_stock_vllm_to_the_bit_and_prompts_are_shared(cases: dict[str, Case]) -> None:
    """A prompt read once at full depth is a prefix hit for every speed whose prompts run all layers."""
    case, found = cases["llama"], []
    requests = [Request(request.prompt, 1.0, NEW) for request in case.requests[:12]]
    prompt = tuple(random.Random(4).choices(range(2, 256), k=70))
    with engine(case.folder, stock=True, enable_prefix_caching=True) as made:
        assert type(runner(made)).__module__.startswith("vllm")
        found.append(serve(made, requests, logprobs=1))
    with case.engine(adapter=True, enable_prefix_caching=True) as made:
        found.append(serve(made, requests, logprobs=1))
        for speedup, cached in ((1.0, 0), (2.0, 64), (3.0, 0), (2.0, 64)):
            assert serve(made, [Request(prompt, speedup, NEW)]).cached[0] == cached
    assert found[0].tokens == found[1].tokens
    assert found[0].logprobs == found[1].logprobs


def test_another_models_adapter_is_refused(cases: dict[str, Case], tmp_path: Path) -> None:
    """One weight that differs is enough."""
    case, other = replace(cases["llama"]), tmp_path / "other"
    copytree(case.folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] += 0.1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    case.folder = other
    with pytest.raises(ModelError, match="another model"), case.engine(adapter=True):
        pass
