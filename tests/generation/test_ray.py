"""Jobs on a Ray cluster end in the bytes of one process."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import TEXTS
from skipdecode.errors import MissingExtra, ModelError, UsageError
from skipdecode.generation import ray
from skipdecode.generation.job import GenerationJob
from skipdecode.loading.load import Checkpoint

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: skipdecode[ray]")


def job(checkpoint: Path, target: Path, **options: Any) -> GenerationJob:
    prompts = [f"{text} {i}" for i in range(3) for text in TEXTS]
    new = {"max_new_tokens": 12} | options.pop("options", {})
    return GenerationJob(
        Checkpoint.resolve(checkpoint), prompts, target, speedup=2, batch_size=4, options=new, **options
    )


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
def test_every_worker_finds_room(nodes: list[dict[str, float]], workers: int, on_gpu: bool, cpus: int) -> None:
    """One that fits on no node would be waited for without end."""
    assert ray.cpus_per_worker(nodes, workers, on_gpu) == cpus


def test_what_is_not_installed_is_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[ray\]'"):
        job(checkpoint, tmp_path / "out", workers=2).run()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_write_what_one_process_writes(checkpoint: Path, tmp_path: Path) -> None:
    """Greedy and sampled; an interrupted job goes on, with or without workers, and redoes no finished row."""
    import ray as library

    library.init(num_cpus=2, log_to_driver=False, logging_level="ERROR")
    try:
        for name, options in [("greedy", {}), ("sampled", {"do_sample": True})]:
            alone = job(checkpoint, tmp_path / f"{name}-alone", options=options).run()
            spread = job(checkpoint, tmp_path / f"{name}-spread", options=options, workers=2).run()
            assert (tmp_path / f"{name}-alone").read_bytes() == (tmp_path / f"{name}-spread").read_bytes()
            for figure in ("rows", "tokens", "average_depth", "layer_ratio", "peak_kv_bytes"):
                assert spread.summary[figure] == alone.summary[figure]
            assert "decode_seconds" not in spread.summary

        def stop(stats: Any) -> None:
            raise KeyboardInterrupt

        for first, then in [(1, 0), (0, 1)]:
            target = tmp_path / f"broken{first}"
            with pytest.raises(KeyboardInterrupt):
                job(checkpoint, target, workers=first).run(on_batch=stop)
            told: list[tuple[int, int]] = []
            job(checkpoint, target, workers=then).run(on_start=lambda *rows, told=told: told.append(rows))
            assert [done for _, done in told] == [4]
            assert target.read_bytes() == (tmp_path / "greedy-alone").read_bytes()

        with pytest.raises(UsageError, match="3 workers on CPUs find no room"):
            job(checkpoint, tmp_path / "three", workers=3).run()
        damaged = tmp_path / "damaged"
        shutil.copytree(checkpoint, damaged)
        (damaged / "model.safetensors").write_bytes(b"no weights")
        with pytest.raises(ModelError, match="cannot be loaded"):
            job(damaged, tmp_path / "bad", workers=1).run()
    finally:
        library.shutdown()
