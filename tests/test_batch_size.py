"""``batch_size="auto"``: as many rows of like length as fit, by what the first batch took; no row lost or repeated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import skipdecode
from helpers.families import SCHEDULES, build
from helpers.tiny import TEXTS, write_jsonl
from helpers.tiny import run as command
from skipdecode import attach
from skipdecode.errors import ModelError, UsageError
from skipdecode.generation import batch_size, generate
from skipdecode.generation.batch import generate_batch
from skipdecode.generation.batch_size import FIRST_ROWS, MOST_ROWS, BatchSizes, is_out_of_memory
from skipdecode.generation.jobs import GenerationJob
from skipdecode.generation.results import Cost
from skipdecode.weights import memory
from skipdecode.weights.loading import load_tokenizer
from skipdecode.weights.memory import PeakMeter

PROMPTS = [*TEXTS, "the", "a cat", " ".join(TEXTS[:3])]
#: Greedy in float32: a row's text does not depend on its batch.
OPTIONS: dict[str, Any] = {"speedup": 3, "max_new_tokens": 9}


@pytest.fixture
def sizes_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Prompt lengths of each batch that is generated."""
    seen: list[tuple[int, ...]] = []

    def spied(model: Any, tokenizer: Any, rows: Any, *args: Any, **options: Any) -> Any:
        seen.append(tuple(map(len, rows)))
        return generate_batch(model, tokenizer, rows, *args, **options)

    monkeypatch.setattr(generate, "generate_batch", spied)
    return seen


def room_for(monkeypatch: pytest.MonkeyPatch, bytes_free: float) -> None:
    """Let there be so much memory for batches."""
    monkeypatch.setattr(batch_size, "available_memory", lambda *_, **__: int(bytes_free / batch_size.SHARE))


def test_mapped_weights_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, whose page cache they are part of, they are taken off its room once."""
    machine = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=9e9))
    monkeypatch.setattr(memory, "_psutil", lambda: machine)
    monkeypatch.setattr(batch_size, "mapped_bytes", lambda: 400)
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path, "max", "current", ""),))
    for name, text in (("max", "3000"), ("current", "1500"), ("memory.stat", "active_file 600\ninactive_file 300")):
        (tmp_path / name).write_text(text)
    found = BatchSizes.of(build("llama"), 2)
    assert found.budget == batch_size.SHARE * (3000 - 1500 + 900 - 400)


def test_the_meter_counts_what_is_alive_at_once() -> None:
    """Freed tensors and views do not count."""
    weight = torch.ones(1000)
    with PeakMeter() as meter:
        a = weight.view(10, 100) + 1  # 4,000 bytes
        b = a.t() * 2  # 8,000
        del a
        c = b + 1  # 8,000
        del b, c
        torch.ones(500)
    assert meter.peak == 8000


@pytest.mark.slow
@pytest.mark.parametrize("key", ["top", "list", "prompt"])
def test_what_the_first_batch_took_covers_the_others(key: str) -> None:
    """No later batch of like or shorter prompts holds more than what was measured says, however long its texts."""
    model, tokenizer = attach(build("llama")), load_tokenizer("demo")
    ids = list(range(2, 32))

    def measure(rows: int, width: int, new: int) -> tuple[int, Cost]:
        with PeakMeter() as meter:
            options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new}
            _, cost = generate_batch(model, tokenizer, [ids[:width]] * rows, SCHEDULES[key], **options)
        return meter.peak, cost

    for first in (2, 20):
        sizes = BatchSizes(1e9, 20)
        peak, cost = measure(FIRST_ROWS, 30, first)
        sizes.measured(peak, 30, cost)
        assert sizes.per_position is not None
        for rows, width in ((1, 30), (8, 30), (8, 16)):
            room = rows * sizes.per_position * (width + 20)
            assert measure(rows, width, 20)[0] <= 1.3 * room, (first, rows, width)  # growing layers move


@pytest.mark.parametrize("budget", [1, 900, 5000, 1e9])
def test_batches_are_the_largest_of_like_length_that_fit(budget: float) -> None:
    """Every row once; a small batch first; within the budget or alone; at most half padding; no crumbs."""
    lengths = sorted((1 + (i * 37) % 97 for i in range(500)), reverse=True)
    sizes, at, made = BatchSizes(budget, new_tokens=3), 0, []
    while at < len(lengths):
        count = sizes.next(lengths, at)
        made.append(lengths[at : at + count])
        at += count
        if len(made) == 1:
            assert 0 < count <= FIRST_ROWS
            sizes.measured(count * 10 * (lengths[0] + 2), lengths[0], Cost(8, rows=count, steps=1))
    assert [length for batch in made for length in batch] == lengths
    for batch in made[1:]:
        fit = max(min(int(budget / (10 * (batch[0] + 3))), MOST_ROWS), 1)
        assert len(batch) <= fit
        assert 2 * batch[-1] > batch[0]
        rest = lengths[lengths.index(batch[0]) :]
        like = sum(2 * length > batch[0] for length in rest)
        assert len(batch) >= min(like, fit) // 2


@pytest.mark.slow
def test_texts_are_those_of_any_batch_size(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, sizes_seen: list[tuple[int, ...]]
) -> None:
    """Greedy and sampled, with plenty of memory and with little; completions in the order of the prompts."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    for options in (OPTIONS, OPTIONS | {"do_sample": True, "seed": 3, "top_k": 20}):
        expected = skipdecode.generate(model, tokenizer, PROMPTS, **options)
        counts = []
        for free in (1, 400_000, 1e12):
            room_for(monkeypatch, free)
            sizes_seen.clear()
            found = skipdecode.generate(model, tokenizer, PROMPTS, batch_size="auto", **options)
            assert found.completions == expected.completions
            counts.append(len(sizes_seen))
        assert len(PROMPTS) >= counts[0] > counts[1] > counts[2]


def test_a_batch_that_does_not_fit_is_halved(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of a batch: half as many rows, from there on; not one: an error that says so."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    expected = skipdecode.generate(model, tokenizer, PROMPTS, **OPTIONS)
    most, tried = 3, []

    def small(model: Any, tokenizer: Any, rows: Any, *args: Any, **options: Any) -> Any:
        tried.append(len(rows))
        result = generate_batch(model, tokenizer, rows, *args, **options)
        if len(rows) > most:
            torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine has
        return result

    monkeypatch.setattr(generate, "generate_batch", small)
    found = skipdecode.generate(model, tokenizer, PROMPTS, batch_size="auto", **OPTIONS)
    assert found.completions == expected.completions
    assert max(tried) > most
    assert sum(size for size in tried if size <= most) == len(PROMPTS)
    most = 0
    with pytest.raises(ModelError, match=r"not even one row of \d+ tokens fits into memory"):
        skipdecode.generate(model, tokenizer, PROMPTS, batch_size="auto", **OPTIONS)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        skipdecode.generate(model, tokenizer, PROMPTS, batch_size=4, **OPTIONS)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert not is_out_of_memory(RuntimeError("shapes"))


def test_a_killed_job_goes_on_with_other_batches(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little memory at first, more after the kill: no row is lost, repeated or another."""
    options = {"do_sample": True, "max_new_tokens": 9}
    source = write_jsonl(tmp_path / "in.jsonl", ({"prompt": text} for text in PROMPTS))
    whole = GenerationJob(str(checkpoint), source, tmp_path / "whole.jsonl", speedup=3, options=options, batch_size=2)
    whole.run()
    job = GenerationJob(str(checkpoint), source, tmp_path / "out.jsonl", speedup=3, options=options, batch_size="auto")
    room_for(monkeypatch, 400_000)

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(on_batch=stop)
    room_for(monkeypatch, 1e12)
    done: list[int] = []
    job.run(on_start=lambda total, before: done.extend((total, before)))
    assert 0 < done[1] < done[0] == len(PROMPTS)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_depends_on_its_batch_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Sampled beams; sizes that are none. Before weights are loaded, with exit code 2."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    with pytest.raises(UsageError, match="sampled beams"):
        skipdecode.generate(model, tokenizer, PROMPTS, batch_size="auto", do_sample=True, num_beams=2)
    with pytest.raises(UsageError, match="or 'auto', not 'most'"):
        skipdecode.generate(model, tokenizer, PROMPTS, batch_size="most")  # type: ignore[arg-type]
    found = skipdecode.generate(model, tokenizer, PROMPTS, batch_size="auto", num_beams=2, max_new_tokens=5)
    assert (
        found.completions == skipdecode.generate(model, tokenizer, PROMPTS, num_beams=2, max_new_tokens=5).completions
    )
    source = write_jsonl(tmp_path / "in.jsonl", ({"prompt": text} for text in PROMPTS))
    for size in ("0", "-1", "most", "1e3", "2000000"):
        done = command("generate", checkpoint, "--input", source, "--batch-size", size)
        assert done.returncode == 2, size
    outputs = [
        command("generate", checkpoint, "--input", source, "--batch-size", size, "--max-new-tokens", 5).stdout
        for size in ("auto", "3")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(PROMPTS)
