"""Generation jobs: no row is lost, none repeated, bad ones are reported, whatever kills the job."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from helpers.tiny import TEXTS, write_jsonl
from skipdecode import Schedule
from skipdecode.data.tasks import get_task
from skipdecode.errors import DataError, FileError, UsageError
from skipdecode.generation import job as jobs
from skipdecode.generation.job import GenerationJob
from skipdecode.generation.stats import Completion, GenerationOutput, GenerationStats
from skipdecode.loading.load import Checkpoint

NEW: dict[str, Any] = {"max_new_tokens": 4}


@pytest.fixture(scope="module")
def tiny(checkpoint: Path) -> Checkpoint:
    return Checkpoint.resolve(checkpoint)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Ends a job in this process where a kill would."""


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Replaces the engine by one that writes each prompt's length and seed; the batches that it generates."""
    batches: list[list[list[int]]] = []

    @contextmanager
    def start_engine(job: GenerationJob, *_: Any) -> Iterator[Any]:
        def generate_batch(batch: Sequence[list[int]], seed: int) -> GenerationOutput:
            batches.append([list(prompt) for prompt in batch])
            texts = [Completion(f" é{len(prompt)} {seed}\n", 3, "stop") for prompt in batch]
            return GenerationOutput(GenerationStats(8, rows=len(batch), tokens=3 * len(batch), seconds=1.0), texts)

        yield generate_batch

    monkeypatch.setattr(jobs, "start_engine", start_engine)
    return batches


# --- a whole job


def test_output_is_what_generate_writes_in_the_inputs_order(tiny: Checkpoint, tmp_path: Path) -> None:
    """With the columns of the input, and figures of the whole job."""
    rows = [{"id": i, "prompt": text, "tokens": "old"} for i, text in enumerate(TEXTS)]
    source, target = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    told: list[Any] = []
    job = GenerationJob(tiny, source, target, speedup=2, batch_size=4, options=NEW)
    result = job.run(on_start=lambda *rows: told.append(rows), on_batch=lambda stats: told.append(stats.rows))
    assert told == [(len(TEXTS), 0), *[4] * (len(TEXTS) // 4), *([len(TEXTS) % 4] if len(TEXTS) % 4 else [])]
    written = skipdecode.generate(*skipdecode.load(tiny.name), TEXTS, speedup=2, batch_size=4, **NEW)
    expected = [
        {"id": i, "prompt": text, "text": row.text, "tokens": row.tokens, "finish_reason": row.finish_reason}
        for i, (text, row) in enumerate(zip(TEXTS, written.completions, strict=True))
    ]
    assert read(target) == expected == list(result.rows)
    assert target.read_text() == result.jsonl
    assert result.completions == written.completions
    assert result.texts == [row.text for row in written.completions]
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]
    summary = result.summary
    assert (summary["rows"], summary["bad_rows"], summary["layers"]) == (len(TEXTS), 0, 8)
    assert summary["layer_ratio"] == round(written.stats.layer_ratio, 3) == 2
    assert result.stats.tokens == written.stats.tokens


@contextmanager
def chat_template(checkpoint: Checkpoint) -> Iterator[None]:
    checkpoint.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    yield
    checkpoint.tokenizer.chat_template = None


def test_words_of_the_assistant_are_continued(tiny: Checkpoint, tmp_path: Path, echo: Any) -> None:
    """In a file as in a list; that is said."""
    begun = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": begun}])
    with chat_template(tiny):
        for prompts in (source, [begun]):
            told: list[str] = []
            GenerationJob(tiny, prompts, options=NEW).run(say=told.append)
            assert tiny.tokenizer.decode(echo.pop()[0]) == "the cat\nsat on"
            assert any("which is continued" in message for message in told)


def test_prompts_in_a_list_are_taken_as_they_are(tiny: Checkpoint, echo: Any) -> None:
    """Texts and conversations; conversations come back as they can be read again."""
    asked = [{"role": "user", "content": "the cat"}]
    with chat_template(tiny):
        told: list[str] = []
        result = GenerationJob(tiny, ["the cat", asked], options=NEW).run(say=told.append)
    assert [row["prompt"] for row in json.loads(f"[{','.join(result.jsonl.splitlines())}]")] == ["the cat", asked]
    assert any("rows with `messages`" in message for message in told)
    with pytest.raises(UsageError, match="prompt 0 is neither"):
        GenerationJob(tiny, [7], options=NEW).run()


def test_the_task_makes_prompts_of_rows(tiny: Checkpoint, tmp_path: Path, echo: Any) -> None:
    """E2E has one row for each reference: its prompts are generated once. A column `text` is the prompt's."""
    mrs = ["name[A], food[B]", "name[C]", "name[A], food[B]"]
    source = write_jsonl(tmp_path / "in.jsonl", ({"mr": mr, "ref": str(i)} for i, mr in enumerate(mrs)))
    result = GenerationJob(tiny, source, task=get_task("e2e"), options=NEW).run()
    assert [row["mr"] for row in result.rows] == mrs[:2]
    assert len(result.texts) == 2
    task = get_task("jsonl", prompt_share=0.5)
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "the cat sat down", "id": 1}])
    (row,) = GenerationJob(tiny, source, task=task, options=NEW).run().rows
    assert (row["prompt"], row["id"], row["text"].startswith(" é")) == ("the cat", 1, True)
    (row,) = GenerationJob(tiny, source, task=task).run().rows
    assert "128 new ones" in row["error"]  # the task's


# --- rows that cannot be generated


def test_rows_that_the_model_has_no_positions_for_are_errors_of_their_own(tiny: Checkpoint, echo: Any) -> None:
    """Beside good ones, and alone; no model is loaded for nothing."""
    result = GenerationJob(tiny, ["the cat", "the" + " the" * 199, ""], options=NEW).run()
    columns = [sorted(row) for row in result.rows]
    assert columns == [["finish_reason", "prompt", "text", "tokens"], ["error", "prompt"], ["error", "prompt"]]
    assert "200 prompt tokens and 4 new ones: the model has 96 positions" in result.rows[1]["error"]
    assert result.rows[2]["error"] == "the prompt has no token to go on from"
    assert result.completions[1:] == [None, None]
    assert (result.summary["rows"], result.summary["bad_rows"]) == (1, 2)
    echo.clear()
    assert GenerationJob(tiny, ["the " * 200], options=NEW).run().texts == []
    assert echo == []


def test_a_bad_row_is_an_error_with_its_number(tiny: Checkpoint, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"question": "b"}])
    with pytest.raises(DataError, match=r"in\.jsonl, row 2: no prompt"):
        GenerationJob(tiny, source, options=NEW).run()
    source.write_text("")
    with pytest.raises(DataError, match="holds no rows"):
        GenerationJob(tiny, source, options=NEW).run()


# --- what is refused, and said


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"options": {"max_length": 15}}, "give max_new_tokens"),
        ({"options": {"temperature": 0.5}}, "do_sample"),
        ({"speedup": 2, "schedule": Schedule.full(8)}, "one of speedup and schedule"),
    ],
)
def test_options_are_checked_before_weights_are_loaded(
    tiny: Checkpoint, options: dict[str, Any], match: str, echo: Any
) -> None:
    with pytest.raises(UsageError, match=match):
        GenerationJob(tiny, ["the cat"], **options).run()
    assert echo == []


def test_a_schedule_is_chosen_once_and_said(checkpoint: Path, tmp_path: Path, echo: Any) -> None:
    """An untrained model runs at 1x, with a line; below, that its texts will be poor."""
    tiny = Checkpoint.resolve(checkpoint)
    for options, words, speedup in (
        ({}, "was not trained to skip layers: it runs at 1x", 1),
        ({"speedup": 2}, "was not trained to skip layers", 2),
        ({"speedup": 1}, None, 1),
        ({"schedule": Schedule(8, 4, 2, 5)}, "was not trained", pytest.approx(8 / 3, rel=0.01)),
    ):
        told: list[str] = []
        result = GenerationJob(tiny, ["the cat"], options=NEW, **options).run(say=told.append)
        assert any(words in message for message in told) if words else not told
        assert result.summary["target_speedup"] == speedup


def test_an_output_that_exists_is_kept(tiny: Checkpoint, tmp_path: Path, echo: Any) -> None:
    """Unless --overwrite; until the new one is whole even then. A missing folder is found before any work."""
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    job = GenerationJob(tiny, TEXTS[:4], target, batch_size=2, options=NEW)
    with pytest.raises(UsageError, match=r"out\.jsonl exists: give --overwrite"):
        job.run()
    again = GenerationJob(tiny, TEXTS[:4], target, batch_size=2, options=NEW, overwrite=True)
    meanwhile: list[str] = []
    result = again.run(on_batch=lambda stats: meanwhile.append(target.read_text()))
    assert set(meanwhile) == {"old"}
    assert target.read_text() == result.jsonl
    with pytest.raises(FileError, match="nowhere"):
        GenerationJob(tiny, TEXTS[:4], tmp_path / "nowhere" / "out.jsonl", options=NEW).run()
    assert names(tmp_path) == ["out.jsonl"]


# --- jobs that are killed


def killed_after(batches: int) -> Any:
    """A callback that kills the job after so many batches."""
    left = [batches]

    def count(stats: GenerationStats) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed

    return count


def job_of(tiny: Checkpoint, target: Path, **options: Any) -> GenerationJob:
    """Eight rows in four batches."""
    prompts = [f"{'the ' * (i % 5)}é {i}" for i in range(8)]
    settings: dict[str, Any] = {"options": NEW, "seed": 3} | options
    return GenerationJob(tiny, prompts, target, batch_size=2, **settings)


def test_a_killed_job_does_only_the_rest(tiny: Checkpoint, tmp_path: Path, echo: Any) -> None:
    """Its figures are those of both runs."""
    whole = job_of(tiny, tmp_path / "whole.jsonl").run()
    every = list(echo)
    target = tmp_path / "out.jsonl"
    for batches in (1, 2, 3):
        echo.clear()
        with suppress(Killed):
            job_of(tiny, target).run(on_batch=killed_after(batches))
        told: list[Any] = []
        result = job_of(tiny, target).run(on_start=lambda *rows, told=told: told.append(rows))
        assert told == [(8, 2 * batches)]
        assert echo == every
        assert target.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        assert result.stats == whole.stats
        target.unlink()
    assert names(tmp_path) == ["whole.jsonl"]


class Breaker:
    """Kills a job at the ``last`` change that it makes to the disk, before or after the change."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int, after: bool) -> None:
        self.calls = 0
        self.last = last
        self.after = after
        for where, name in ((os, "replace"), (Path, "unlink"), (Path, "write_bytes"), (Path, "open")):
            patch.setattr(where, name, self.around(getattr(where, name)))

    def around(self, function: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.last and not self.after:
                raise Killed
            value = function(*arguments, **options)
            if self.calls == self.last:
                raise Killed
            return value

        return called


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_between_any_two_changes_loses_and_repeats_nothing(
    tiny: Checkpoint, tmp_path: Path, echo: Any, overwrite: bool
) -> None:
    """The same job just goes on; with --overwrite the old output stays until the new one is whole."""
    expected = job_of(tiny, tmp_path / "whole.jsonl").run().jsonl.encode()
    target = tmp_path / "out" / "out.jsonl"
    target.parent.mkdir()
    moments = 0
    for last, after in product(range(1, 100), (False, True)):
        if overwrite:
            target.write_bytes(b"old")
        echo.clear()
        with pytest.MonkeyPatch.context() as patch:
            breaker = Breaker(patch, last, after)
            with suppress(Killed):
                job_of(tiny, target, overwrite=overwrite).run()
        if breaker.calls < last:
            break
        moments += 1
        assert not target.exists() or target.read_bytes() in (b"old", expected)
        assert target.exists() or not overwrite
        finished = target.exists() and not target.with_name("out.jsonl.partial").exists()
        if not finished or overwrite:
            job_of(tiny, target, overwrite=overwrite).run()
        assert target.read_bytes() == expected
        assert len(echo) <= 5 or (finished and overwrite and len(echo) == 8)  # at most one batch is repeated
        assert [name for name in names(target.parent) if not name.startswith(".")] == ["out.jsonl"]
        shutil.rmtree(target.parent)
        target.parent.mkdir()
    assert moments > 10


def test_a_job_with_other_settings_is_another(checkpoint: Path, tmp_path: Path, echo: Any) -> None:
    """Its batches are dropped only where that is asked for; other weights are another model."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    target = tmp_path / "out.jsonl"

    def begin() -> None:
        target.with_name("out.jsonl.partial").unlink(missing_ok=True)
        with suppress(Killed):
            job_of(Checkpoint.resolve(model), target).run(on_batch=killed_after(2))

    others: list[dict[str, Any]] = [
        {"speedup": 4},
        {"seed": 4},
        {"options": NEW | {"do_sample": True}},
        {"batch_size": 4},
        {"prompts": ["the cat"]},
        {"load": {"dtype": "bfloat16"}},
        {"engine": "vllm"},
    ]
    begin()
    for other in others:
        settings = {"prompts": job_of(Checkpoint.resolve(model), target).prompts, "batch_size": 2, "seed": 3}
        job = GenerationJob(Checkpoint.resolve(model), output=target, **{"options": NEW} | settings | other)
        with pytest.raises(UsageError, match=r"begun with another .*--overwrite"):
            job.run()
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-4096] + bytes(4096))
    with pytest.raises(UsageError, match="begun with another model"):
        job_of(Checkpoint.resolve(model), target).run()
    echo.clear()
    job_of(Checkpoint.resolve(model), target, overwrite=True).run()
    assert len(echo) == 4
    target.unlink()
    begin()
    (model / "notes.txt").write_text("of mine")
    echo.clear()
    job_of(Checkpoint.resolve(model), target).run()
    assert len(echo) == 2


@pytest.mark.slow
def test_a_kill_ends_in_the_bytes_of_an_unbroken_run(checkpoint: Path, tmp_path: Path) -> None:
    """SIGKILL, in a process that samples."""
    source = write_jsonl(tmp_path / "in.jsonl", ({"prompt": f"{text} {i}"} for i in range(6) for text in TEXTS[:4]))
    target, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"

    def job(output: Path) -> GenerationJob:
        options = {"max_new_tokens": 20, "do_sample": True}
        return GenerationJob(Checkpoint.resolve(checkpoint), source, output, batch_size=2, seed=5, options=options)

    process = multiprocessing.get_context("fork").Process(target=job(target).run)
    process.start()
    while not partial.exists() or partial.read_bytes().count(b"\n") < 4:
        assert process.is_alive(), "the job ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not target.exists()
    for output in (target, tmp_path / "whole.jsonl"):
        job(output).run()
    assert target.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(read(target)) == 24
    assert names(tmp_path) == ["in.jsonl", "out.jsonl", "whole.jsonl"]
