"""One gate serves every family: native layers of vLLM and those of its Transformers backend."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers.engine import Reference, Request, engine, runner, serve
from skipdecode import Schedule, teacher_forced
from skipdecode.core.checkpoint_config import to_config_entry
from skipdecode.data.tokenization import train_tokenizer

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
#: Family -> its own fields, and how vLLM runs it.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "auto"),
    "llama by transformers": ({}, "transformers"),
    "qwen2": ({}, "auto"),
    "qwen3": ({}, "auto"),
    "mistral": ({"sliding_window": None}, "auto"),
    "gemma3_text": ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3}, "auto"),
    "gpt_neox": ({"num_key_value_heads": 2}, "auto"),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "auto"),
    "gemma2": ({"sliding_window": 16}, "auto"),
    "phi3": ({}, "auto"),
    "gpt2": ({"n_inner": 96}, "auto"),
    "cohere": ({}, "auto"),
    "exaone4": ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3}, "auto"),
    "gemma4_text": (
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
        },
        "auto",
    ),
    "qwen3_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "auto"),
}


def checkpoint(name: str, folder: Path) -> Path:
    """Random weights with the schedules above in their config."""
    tokenizer = train_tokenizer(["the cat sat on the mat"], vocab_size=300)
    fields, _ = FAMILIES[name]
    kind = CONFIG_MAPPING[name.split()[0]]
    torch.manual_seed(0)
    config = kind(**(COMMON | fields), vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=1)
    config.skipdecode = to_config_entry(SCHEDULES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # wide enough that two tokens are seldom nearly tied
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Case:
    """A checkpoint, requests to it, and what our own ``generate`` and teacher forcing say of them."""

    folder: Path
    requests: list[Request]
    texts: list[tuple[int, ...]]
    logprobs: list[torch.Tensor]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All of them before vLLM is asked: its Transformers backend changes transformers' classes for the process."""
    found = {}
    for name in FAMILIES:
        folder = checkpoint(name, tmp_path_factory.mktemp("family"))
        reference = Reference(folder, most_new=24)
        source = random.Random(0)
        requests = [
            Request(tuple(source.choices(range(2, 256), k=source.randint(1, 40))), source.choice(list(SCHEDULES)), 24)
            for _ in range(48)
        ]
        texts = reference.texts(requests)
        scored = [teacher(reference, request, text) for request, text in zip(requests, texts, strict=True)]
        found[name] = Case(folder, requests, texts, scored)
    return found


@torch.no_grad()
def teacher(reference: Reference, request: Request, text: tuple[int, ...]) -> torch.Tensor:
    """The log-probability of each new token in one pass over the whole text."""
    ids = torch.tensor([[*request.prompt, *text]])
    with teacher_forced(reference.model, SCHEDULES[request.speedup], len(request.prompt)):
        logits = reference.model(input_ids=ids, use_cache=False).logits
    logprobs = logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(text)[:, None])[:, 0]


@pytest.mark.parametrize("name", [*FAMILIES, "mixtral compiled"])
def test_texts_and_log_probabilities_are_those_of_generate_and_of_teacher_forcing(
    name: str, cases: dict[str, Case]
) -> None:
    """All schedules in one batch, chunks of prompts between them."""
    family, compiled = name.removesuffix(" compiled"), name.endswith("compiled")
    case = cases[family]
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "max_model_len": 96}
    with engine(case.folder, model_impl=FAMILIES[family][1], enforce_eager=not compiled, **sizes) as made:
        served = serve(made, case.requests, arrive=lambda step: 1 + step % 2, logprobs=1)
        plan = runner(made).skip_plan
    assert not [i for i, text in enumerate(case.texts) if served.tokens[i] != text]
    for place, expected in enumerate(case.logprobs):
        torch.testing.assert_close(torch.tensor(served.logprobs[place]), expected, rtol=1e-3, atol=1e-3)
    assert plan.needed_tokens < plan.full_tokens
