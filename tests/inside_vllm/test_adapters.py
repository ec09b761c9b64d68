"""Inside vLLM an adapter acts on the tokens that skip layers, as in our own ``generate``, and on no other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import load_file, save_file

import skipdecode
from helpers.engine import Reference, Request, engine, runner, serve
from helpers.served_families import FAMILIES, LAYERS, checkpoint, in_fresh_process
from helpers.server import serve as serve_http
from skipdecode import Schedule
from skipdecode.data.inputs import read_items
from skipdecode.data.tasks import get_task
from skipdecode.errors import ModelError
from skipdecode.generation.job import GenerationJob
from skipdecode.generation.vllm import VllmEngine
from skipdecode.loading.load import DEMO
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.model.config import CONFIG_KEY
from skipdecode.model.inspect import text_config

#: Two that are flat and share no gap; one whose depth falls, with layer 0 skipped.
SCHEDULES = {
    2.0: Schedule(LAYERS, 3, 3, horizon=1, decay="constant", order="top", warmup=1),
    3.0: Schedule(LAYERS, 2, 2, horizon=1, decay="constant", order="even"),
    4.0: Schedule(LAYERS, 3, 1, horizon=6, order=(5, 1, 3, 0, 2, 4), warmup=0),
}


def adapter_for(folder: Path, base: str, schedules: Mapping[float, Schedule] = SCHEDULES) -> Path:
    """An adapter with random weights, which change hidden states much."""
    model, _ = skipdecode.load(base, dtype="float32")
    adapter = Adapter(text_config(model.config).hidden_size, 4, schedules)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    save_adapter(folder, adapter, model, base)
    return folder


@dataclass
class Case:
    """A checkpoint, the folder of its adapter, requests, and what ``generate`` writes with it and with an idle one.

    ``shared`` has the texts after one long prompt, at every speed.
    """

    base: Path
    folder: Path
    requests: list[Request]
    texts: list[tuple[int, ...]]
    idle: list[tuple[int, ...]]
    shared: dict[Request, tuple[int, ...]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return in_fresh_process(references, {name: tmp_path_factory.mktemp("family") for name in FAMILIES})


def references(folders: Mapping[str, Path]) -> dict[str, Case]:
    """A case of each family, with its two checkpoints in the family's folder."""
    found = {}
    for name, folder in folders.items():
        base = checkpoint(name, folder / "base")
        made, requests = adapter_for(folder / "adapter", str(base)), requests_of(48, seed=0)
        reference = Reference(made, most_new=24)
        texts, without = reference.texts(requests), Reference(made, most_new=24)
        idle = Adapter(text_config(without.model.config).hidden_size, 4, SCHEDULES)
        skipdecode.attach(without.model, adapter=idle)
        prompt = tuple(random.Random(4).choices(range(2, 256), k=80))
        shared = [Request(prompt, speedup, 24) for speedup in (1.0, *SCHEDULES)]
        after = dict(zip(shared, reference.texts(shared), strict=True))
        found[name] = Case(base, made, requests, texts, without.texts(requests), after)
    return found


def served_by(base: Path, folder: Path, **options: Any) -> Any:
    """An engine of the model with the adapter."""
    return engine(base, additional_config={CONFIG_KEY: {"adapter": str(folder)}}, **options)


def requests_of(count: int, seed: int) -> list[Request]:
    """Requests of all speeds."""
    source = random.Random(seed)
    return [
        Request(tuple(source.choices(range(2, 256), k=source.randint(1, 40))), source.choice([1.0, *SCHEDULES]), 24)
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3 compiled"])
def test_every_request_gets_its_own_speeds_adapter(name: str, cases: dict[str, Case]) -> None:
    """Speeds mixed in one step, prompts that come in meanwhile: the tokens of ``generate``, layer for layer."""
    family, compiled = name.removesuffix(" compiled"), name.endswith("compiled")
    case, source = cases[family], random.Random(1)
    options: dict[str, Any] = {"model_impl": FAMILIES[family][1], "enforce_eager": not compiled}
    with served_by(case.base, case.folder, **options) as made:
        served = serve(made, case.requests, arrive=lambda step: source.choice((0, 1, 2)))
        plan = runner(made).skip_context
    assert [served.tokens[i] for i in range(len(case.requests))] == case.texts != case.idle
    assert plan.needed_tokens == plan.run_tokens < plan.full_tokens


def test_full_depth_is_stock_vllm_to_the_bit(cases: dict[str, Case]) -> None:
    """Log-probabilities of requests at 1x, with the adapter loaded, and those of an engine without the plugin."""
    case, found = cases["llama"], []
    requests = [Request(each.prompt, 1.0, 24) for each in case.requests[:12]]
    for made in (served_by(case.base, case.folder), engine(case.base, hf_overrides={CONFIG_KEY: None})):
        with made as running:
            found.append(serve(running, requests, logprobs=1))
    assert found[0].tokens == found[1].tokens
    assert found[0].logprobs == found[1].logprobs


def test_a_prompt_is_shared_by_all_speeds(cases: dict[str, Case]) -> None:
    """Read once at full depth, it is a prefix hit for every speed, and the text is the one without a hit."""
    case = cases["llama"]
    with served_by(case.base, case.folder, enable_prefix_caching=True) as made:
        for request, text in case.shared.items():
            served = serve(made, [request])
            assert served.tokens[0] == text
            assert served.cached[0] == (0 if request.speedup == 1.0 else 64)


def test_jobs_and_servers_take_its_folder_as_the_model(tmp_path: Path) -> None:
    """``generate --engine vllm`` and ``serve`` write what ``generate`` does, with the embedded checkpoint (OPT)."""
    from openai import OpenAI

    flat = Schedule(24, 12, 12, horizon=1, decay="constant", order="top", warmup=4)
    folder = adapter_for(tmp_path / "adapter", "demo", {2.0: flat})
    prompts = [str(item.prompt) for item in read_items(str(DEMO / "inputs.csv"), get_task("e2e"))][:6]
    options: dict[str, Any] = {"options": {"max_new_tokens": 24}, "dtype": "float32", "speedup": 2}
    alone = dict(GenerationJob(str(folder), prompts, **options).run().completions)
    assert dict(GenerationJob(str(folder), prompts, engine=VllmEngine(), **options).run().completions) == alone
    assert dict(GenerationJob("demo", prompts, **options).run().completions) != alone
    with serve_http(tmp_path, "--dtype", "float32", "--enforce-eager", model=str(folder)) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        made = client.completions.create(model=f"{folder}:2x", prompt=prompts, max_tokens=24, temperature=0)
    assert [choice.text.strip() for choice in made.choices] == [alone[n].text for n in sorted(alone)]


def test_another_models_adapter_is_refused(cases: dict[str, Case], tmp_path: Path) -> None:
    """One weight that differs is enough."""
    case, other = cases["llama"], tmp_path / "other"
    copytree(case.base, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] += 0.1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="another model"), served_by(other, case.folder):
        pass
