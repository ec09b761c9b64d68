"""One gate serves every family: native layers of vLLM and those of its Transformers backend."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch

from helpers.engine import Reference, Request, engine, runner, serve
from helpers.served_families import FAMILIES, SCHEDULES, checkpoint, in_fresh_process
from skipdecode import teacher_forced


@dataclass
class Case:
    """A checkpoint, requests to it, and what our own ``generate`` and teacher forcing say of them."""

    folder: Path
    requests: list[Request]
    texts: list[tuple[int, ...]]
    logprobs: list[torch.Tensor]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return in_fresh_process(references, {name: tmp_path_factory.mktemp("family") for name in FAMILIES})


def references(folders: Mapping[str, Path]) -> dict[str, Case]:
    """A case of each family, its checkpoint in the family's folder."""
    found = {}
    for name, folder in folders.items():
        reference = Reference(checkpoint(name, folder), most_new=24)
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


@pytest.mark.parametrize("name", [*FAMILIES, "mixtral compiled", "gemma3_text compiled"])
def test_texts_and_log_probabilities_are_those_of_generate_and_of_teacher_forcing(
    name: str, cases: dict[str, Case]
) -> None:
    """All schedules in one batch, chunks of prompts between them."""
    family, compiled = name.removesuffix(" compiled"), name.endswith("compiled")
    case = cases[family]
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "max_model_len": 96}
    with engine(case.folder, model_impl=FAMILIES[family][1], enforce_eager=not compiled, **sizes) as made:
        served = serve(made, case.requests, arrive=lambda step: 1 + step % 2, logprobs=1)
        plan = runner(made).skip_context
    assert not [i for i, text in enumerate(case.texts) if served.tokens[i] != text]
    for place, expected in enumerate(case.logprobs):
        torch.testing.assert_close(torch.tensor(served.logprobs[place]), expected, rtol=1e-3, atol=1e-3)
    assert plan.needed_tokens < plan.full_tokens
