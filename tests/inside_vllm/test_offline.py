"""Jobs with the engine vllm: texts and layers are those of the default engine.

float32, greedy; the demo model.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm import plugins
from vllm.v1.worker.worker_base import WorkerWrapperBase

import skipdecode
from helpers.engine import demo_texts
from skipdecode import Schedule
from skipdecode.errors import ModelError, UsageError
from skipdecode.generation.job import GenerationJob, JobResult
from skipdecode.generation.vllm import start_vllm
from skipdecode.loading.load import Checkpoint
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.model.inspect import decoder_layers


def run(engine: str, model: str = "demo", batch_size: int = 5, **options: Any) -> JobResult:
    """A job without a file, of 8 prompts."""
    kwargs = {"max_new_tokens": 24} | options.pop("options", {})
    job = GenerationJob(
        Checkpoint.resolve(model),
        demo_texts()[:8],
        batch_size=batch_size,
        options=kwargs,
        load={"dtype": "float32", "device": "cpu"},
        engine=engine,
        **options,
    )
    return job.run()


@pytest.mark.parametrize(
    "options",
    [
        {"speedup": 1},
        {"schedule": Schedule.from_depths(24, [20, 9, 9, 3], order="even", prompt_layers=20, prompt_decay=4)},
        {"speedup": 3, "options": {"repetition_penalty": 1.3, "min_new_tokens": 20, "stop_strings": ["The ", "r."]}},
    ],
    ids=["full", "listed", "options"],
)
def test_texts_and_layers_are_the_default_engines(options: dict[str, Any]) -> None:
    """Those of a row alone, since vLLM pads nothing."""
    alone = run("transformers", batch_size=1, **options)
    written = run("vllm", **options)
    assert written.completions == alone.completions
    assert written.stats.layer_steps == alone.stats.layer_steps
    assert written.stats.prompt_layer_positions == alone.stats.prompt_layer_positions


def test_an_adapters_folder_stands_for_its_model(tmp_path: Path) -> None:
    model, _ = skipdecode.load("demo", dtype="float32")
    adapter = Adapter(model.config.hidden_size, 4, {2.0: Schedule.for_speedup(2, 24, warmup=4)})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapter.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    save_adapter(tmp_path, adapter, model, "demo")
    alone = run("transformers", str(tmp_path), speedup=2)
    assert run("vllm", str(tmp_path), speedup=2).completions == alone.completions
    assert alone.completions != run("transformers", speedup=2).completions


def test_a_seed_samples_the_same() -> None:
    """In every run; equal prompts get different texts."""
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 12}
    prompts = [demo_texts()[0]] * 12
    schedule = Schedule.for_speedup(3, 24)
    with start_vllm(Checkpoint.resolve("demo"), {}, 4, schedule, options, 64) as generate:
        ids = Checkpoint.resolve("demo").tokenizer(prompts).input_ids
        first, again, other = ([row.text for row in generate(ids, seed).completions] for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) > 6


def test_nan_never_becomes_a_token(tmp_path: Path) -> None:
    model, tokenizer = skipdecode.load("demo", dtype="float32")
    with torch.no_grad():
        next(decoder_layers(model)[-1].parameters()).fill_(torch.nan)
    skipdecode.detach(model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for engine, error in {"transformers": ModelError, "vllm": RuntimeError}.items():
        with pytest.raises(error, match="NaN"):
            run(engine, str(tmp_path), speedup=2)


def test_without_the_plugin_no_text_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has not loaded it, every speed would be the full model's, in silence."""
    monkeypatch.setattr(plugins, "plugins_loaded", True)
    monkeypatch.setattr(WorkerWrapperBase, "init_device", inspect.unwrap(WorkerWrapperBase.init_device))
    with pytest.raises(UsageError, match="did not load the plugin skipdecode"):
        run("vllm", speedup=2)
