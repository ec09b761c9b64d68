"""``generate --engine vllm``: rows, layers, journal and summary are those of the default engine.

float32, greedy unless a test samples; the embedded checkpoint. ``make test-vllm`` runs these.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.sampling_params", reason="needs vLLM: make test-vllm")

from safetensors.torch import load_file, save_file

from helpers.engine import runner
from helpers.tiny import run, write_jsonl
from skipdecode import Schedule
from skipdecode.errors import ModelError, UsageError
from skipdecode.generation import vllm as offline
from skipdecode.generation.job import GenerationJob, JobResult
from skipdecode.generation.stats import GenerationStats
from skipdecode.generation.vllm import VllmEngine
from skipdecode.loading.load import DEMO


def prompts(count: int) -> list[str]:
    """Inputs as the checkpoint knows them."""
    lines = (DEMO / "inputs.csv").read_text(encoding="utf-8").splitlines()[1:]
    texts = [line.split('"')[1] if line.startswith('"') else line for line in lines]
    return [f"{text} ->" for text in texts[:count]]


def write(count: int = 24, batch_size: int = 5, **options: Any) -> JobResult:
    """A job without a file."""
    new = {"max_new_tokens": 40} | options.pop("options", {})
    return GenerationJob("demo", prompts(count), batch_size=batch_size, options=new, dtype="float32", **options).run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speedup": 1},
        {"speedup": 5, "prompt_layers": "max"},
        {"speedup": 2.5},
        {"schedule": Schedule.from_depths(24, [20, 9, 9, 3], order="even", prompt_layers=20, prompt_decay=4)},
        {"speedup": 3, "options": {"stop_strings": ["The ", "r."]}},
        {"speedup": 3, "options": {"repetition_penalty": 1.3, "min_new_tokens": 20}},
    ],
    ids=str,
)
def test_rows_and_layers_are_the_default_engines(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and counts of a row alone; and the layers that the summary tells are those that vLLM's gates ran."""
    engines: list[Any] = []
    found = offline._engine

    def kept(*arguments: Any) -> Any:
        engines.append(found(*arguments))
        return engines[-1]

    monkeypatch.setattr(offline, "_engine", kept)
    alone, written = write(batch_size=1, **options), write(engine=VllmEngine(), **options)
    assert dict(written.completions) == dict(alone.completions)
    for figure in ("rows", "tokens", "average_depth", "layer_ratio", "target_speedup", "layers"):
        assert written.summary[figure] == alone.summary[figure], figure
    assert not {"decode_seconds", "peak_kv_bytes"} & set(written.summary)
    if options.get("speedup") == 1:
        assert not hasattr(runner(engines[0]), "skip_context")  # stock vLLM
    elif "stop_strings" not in options.get("options", {}):
        plan, cost = runner(engines[0]).skip_context, list[GenerationStats]()
        GenerationJob(
            "demo",
            prompts(24),
            batch_size=1,
            dtype="float32",
            options={"max_new_tokens": 40} | options.pop("options", {}),
            **options,
        ).run(on_batch=cost.append)
        assert plan.run_tokens == sum(each.prompt_layer_positions + each.layer_steps for each in cost)


@pytest.mark.slow
def test_what_a_row_samples_depends_on_the_seed_and_its_number_alone() -> None:
    """Not on how many rows run at once, nor on who they are."""
    options: dict[str, Any] = {"speedup": 3, "engine": VllmEngine(), "options": {"do_sample": True, "temperature": 0.9}}
    first, narrow, fewer = (
        write(seed=1, **options),
        write(seed=1, batch_size=2, **options),
        write(12, seed=1, **options),
    )
    assert dict(first.completions) == dict(narrow.completions)
    assert dict(fewer.completions) == {key: first.completions[key] for key in range(12)}
    assert dict(write(12, seed=2, **options).completions) != dict(fewer.completions)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_job_goes_on_and_is_its_engines_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL: the second run redoes no finished row and ends with an unbroken run's output; others keep away."""
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    rows = write_jsonl(tmp_path / "in.jsonl", [{"prompt": text, "number": i} for i, text in enumerate(prompts(40) * 4)])
    target = tmp_path / "out.jsonl"
    arguments = ["generate", "demo", "--input", rows, "--speedup", 2, "--batch-size", 4, "--max-new-tokens", 48]
    engine = ["--engine", "vllm", "--json"]
    command = [sys.executable, "-m", "skipdecode", *map(str, arguments), *engine, "--output", str(target)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    partial = target.with_name("out.jsonl.partial")
    try:
        end = time.monotonic() + 200
        while not partial.exists() or partial.read_bytes().count(b"\n") < 4:
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    held = partial.read_bytes().count(b"\n")
    other = run(*arguments, "--output", target)
    assert other.returncode == 2
    assert "another input, model or options" in other.stderr
    done = run(*arguments, *engine, "--output", target)
    assert done.returncode == 0, done.stderr
    assert "rows were done before" in done.stderr
    summary = json.loads(done.stdout)  # nothing else is on standard output
    assert summary["rows"] == len(prompts(40) * 4)
    assert held >= 4
    unbroken = tmp_path / "unbroken.jsonl"
    assert run(*arguments, "--output", unbroken).returncode == 0  # the default engine's
    assert target.read_bytes() == unbroken.read_bytes()
    assert not partial.exists()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """Weights that are not finite, or missing: vLLM would write with either."""
    for path in DEMO.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(key for key in weights if "layers.3." in key)
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.3.*not finite"):
        GenerationJob(str(tmp_path), prompts(1), engine=VllmEngine()).run()
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="missing from its files"):
        GenerationJob(str(tmp_path), prompts(1), engine=VllmEngine()).run()


def test_another_engines_journal_is_refused(tmp_path: Path) -> None:
    """Texts of two engines are not mixed in one output."""

    def stop(cost: Any) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "out.jsonl"
    options: dict[str, Any] = {"batch_size": 2, "options": {"max_new_tokens": 3}, "dtype": "float32"}
    with pytest.raises(KeyboardInterrupt):
        GenerationJob("demo", prompts(6), target, **options).run(on_batch=stop)
    with pytest.raises(UsageError, match="another input, model or options"):
        GenerationJob("demo", prompts(6), target, engine=VllmEngine(), **options).run()


@pytest.mark.slow
def test_an_adapter_learns_from_its_texts(tmp_path: Path) -> None:
    """``train --engine vllm``: the own texts are those of a job at full depth. Once there, they need no vLLM."""
    pytest.importorskip("accelerate", reason="needs skipdecode[train]")
    file = write_jsonl(tmp_path / "prompts.jsonl", ({"prompt": text} for text in prompts(20)))
    words = ["train", "demo", "--own-texts", 20, "--prompts", file, "--max-new-tokens", 12, "--temperature", 0.3]
    words += ["--speedup", 2, "--max-steps", 1, "--eval-steps", 0, "--output", tmp_path / "out"]
    done = run(*words, "--engine", "vllm")
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["response"] for line in (tmp_path / "out" / "own_texts.jsonl").read_text().splitlines()]
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.3, "top_p": 1.0, "top_k": 0}
    job = GenerationJob("demo", prompts(20), speedup=1, engine=VllmEngine(), options=options)
    assert texts == job.run().texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "require_vllm", pytest.fail)
        again = run(*words, "--no-resume", "--engine", "vllm")
    assert again.returncode == 0, again.stderr
