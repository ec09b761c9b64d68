"""``batch_size="auto"``: as many rows of like length as fit, predicted from the schedule; no row lost or repeated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import skipdecode
from helpers.families import FORMS, LAYERS, NEW, SCHEDULES, build, prompts, row, run
from helpers.tiny import TEXTS, write_jsonl
from helpers.tiny import run as command
from skipdecode import Schedule, SkipCache, attach
from skipdecode.errors import ModelError, UsageError
from skipdecode.generation import batch_size, generate
from skipdecode.generation.batch import generate_batch
from skipdecode.generation.batch_size import MOST_ROWS, BatchSizes, footprint
from skipdecode.generation.jobs import GenerationJob
from skipdecode.weights import memory
from skipdecode.weights.loading import load_tokenizer
from skipdecode.weights.memory import PeakMeter, is_out_of_memory

PROMPTS = [*TEXTS, "the", "a cat", " ".join(TEXTS[:3])]
#: Greedy in float32: a row's text does not depend on its batch.
OPTIONS: dict[str, Any] = {"speedup": 3, "max_new_tokens": 9}


@pytest.fixture
def sizes_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Prompt lengths of each batch that is generated; what is measured is none."""
    seen: list[tuple[int, ...]] = []

    def spied(model: Any, tokenizer: Any, rows: Any, *args: Any, **options: Any) -> Any:
        seen.append(tuple(map(len, rows)))
        return generate_batch(model, tokenizer, rows, *args, **options)

    monkeypatch.setattr(generate, "generate_batch", spied)
    return seen


def room_for(monkeypatch: pytest.MonkeyPatch, bytes_free: float) -> None:
    """Let there be so much memory for batches."""
    monkeypatch.setattr(batch_size, "available_memory", lambda *_, **__: int(bytes_free / batch_size.SHARE))


@pytest.mark.parametrize("name", FORMS)
def test_keys_and_values_are_predicted_from_the_schedule(name: str) -> None:
    """The most that a row's cache ever held is what two short passes and the schedule say."""
    model, inputs = attach(build(name)), row(prompts(), 0)
    ids = inputs["input_ids"][0].tolist()
    tokenizer = load_tokenizer("demo")
    chosen = {key: SCHEDULES[key] for key in ("top", "permutation", "prompt-wide")}
    for key, schedule in {**chosen, "full": Schedule.full(LAYERS)}.items():
        cache = SkipCache(model, schedule)
        run(model, inputs, past_key_values=cache)
        found = footprint(model, tokenizer, ids, schedule, {"max_new_tokens": NEW}).kv_bytes(len(ids))
        assert cache.peak_kv_bytes == pytest.approx(found, rel=1e-9), key


def test_freed_layers_make_batches_larger() -> None:
    """With the same memory, more rows fit the more layers are skipped."""
    model, ids = attach(build("llama")), list(range(2, 12))
    rows = []
    for speedup in (1, 2, 4):
        schedule = Schedule.for_speedup(speedup, LAYERS, horizon=8)
        found = footprint(model, load_tokenizer("demo"), ids, schedule, {"max_new_tokens": 50})
        rows.append(BatchSizes(found.row_bytes, 40 * 30_000).next([10] * 1000))
    assert rows[0] < rows[1] < rows[2]


@pytest.mark.slow
def test_what_is_predicted_covers_what_a_batch_takes() -> None:
    """A batch of rows never holds more than so many times a row's share."""
    model, tokenizer = attach(build("llama")), load_tokenizer("demo")
    ids = list(range(2, 32))
    for key in ("top", "list", "prompt"):
        found = footprint(model, tokenizer, ids, SCHEDULES[key], {"max_new_tokens": 20})
        for count, width in ((1, 30), (8, 30), (8, 12), (3, 4)):
            with PeakMeter() as meter:
                length = {"max_new_tokens": 20, "min_new_tokens": 20}
                generate_batch(model, tokenizer, [ids[:width]] * count, SCHEDULES[key], **length)
            assert meter.peak <= count * found.row_bytes(width), (key, count, width)


def test_mapped_weights_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, whose page cache they are part of, they are taken off its room once."""
    model, tokenizer = attach(build("llama")), load_tokenizer("demo")
    machine = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=9e9))
    monkeypatch.setattr(memory, "_psutil", lambda: machine)
    monkeypatch.setattr(batch_size, "mapped_bytes", lambda: 400)
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path, "max", "current", ""),))
    for name, text in (("max", "3000"), ("current", "1500"), ("memory.stat", "active_file 600\ninactive_file 300")):
        (tmp_path / name).write_text(text)
    found = batch_size.batch_sizes(model, tokenizer, [[5, 6], [7, 8]], None, {"max_new_tokens": 2})
    assert found._budget == batch_size.SHARE * (3000 - 1500 + 900 - 400)


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


@pytest.mark.parametrize("budget", [1, 900, 5000, 1e9])
def test_batches_are_the_largest_of_like_length_that_fit(budget: float) -> None:
    """Every row once; within the budget or alone; at most half padding; no crumbs."""
    lengths = sorted((1 + (i * 37) % 97 for i in range(500)), reverse=True)
    sizes, left, made = BatchSizes(lambda width: 10.0 * width, budget), list(lengths), []
    while left:
        count = sizes.next(left)
        made.append(left[:count])
        left = left[count:]
    assert [length for batch in made for length in batch] == lengths
    for batch in made:
        fit = max(min(int(budget / (10 * batch[0])), MOST_ROWS), 1)
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
        assert counts[0] == len(PROMPTS) > counts[1] > counts[2]


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
