"""Self-generated texts: what is kept of them, and that a killed run loses none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from transformers import AutoTokenizer

from helpers.tiny import TEXTS
from skipdecode.data.chat import Message
from skipdecode.data.collator import encoded
from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import Example, get_task
from skipdecode.errors import DataError
from skipdecode.generation.job import GenerationJob
from skipdecode.generation.stats import Completion
from skipdecode.loading.load import Checkpoint
from skipdecode.training import self_generated as own

JSONL = get_task("jsonl")


def completions(*texts: str, reason: str = "stop") -> list[Completion]:
    return [Completion(text, 3, reason) for text in texts]


def test_what_teaches_nothing_is_left_out() -> None:
    """And counted; texts of one prompt may not repeat, those of two may be the same."""
    prompts = ["a", "a", "a", "a", "b", "b"]
    texts: Sequence[Any] = [*completions(" x", " x", "\n", "no " * 20, " x"), None]
    said: list[str] = []
    kept = own.keep_texts(prompts, texts, said.append)
    assert kept == [Example("a", (" x",)), Example("b", (" x",))]
    assert said == ["left out of what the model generated: 1 repeated, 1 empty, 1 looping, 1 refused"]
    with pytest.raises(DataError, match="no text is left to learn from"):
        own.self_generate(["a", "b"], JSONL, 2, None, None, lambda *_: completions("", " "), said.append)
    assert said[1:] == ["left out of what the model generated: 2 empty"]


def test_a_text_that_was_cut_has_no_end() -> None:
    """Nor the half of a character; messages that do not end are left out."""
    (kept,) = own.keep_texts(["a"], completions(" caf\ufffd", reason="length"), str)
    assert kept == Example("a", (" caf",), cut=True)
    assert not own.keep_texts(["a"], completions(" caf", reason="length"), str, ended=True)


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        ("no no no no no no no no no", True),
        ("It ends well. " * 5, True),
        ("a" * 30, True),
        ("a text that ends", False),
        ("He said: no no no no", False),
        ("", False),
    ],
)
def test_loops_are_known(text: str, looping: bool) -> None:
    """Four times the same, and not of a few characters alone."""
    assert own.ends_in_loop(text) is looping


@pytest.mark.parametrize(("prompts", "each", "most"), [(40, 1, 100), (40, 3, 100), (40, 3, 2), (1, 30, 100), (5, 4, 0)])
def test_no_text_is_learned_whose_prompt_is_held_out(prompts: int, each: int, most: int) -> None:
    """Texts of one prompt are alike; with fewer than ten prompts only the texts themselves are apart."""
    texts = [Example(f"prompt {i % prompts}", (f"text {i}",)) for i in range(prompts * each)]
    learned, held = own.hold_out(texts, most)
    assert not {*learned} & {*held}
    assert len(held) == min(most, len(texts) // 10)
    if prompts >= 10:
        assert not {text.prompt for text in learned} & {text.prompt for text in held}
        assert {*learned} | {*held} >= {text for text in texts if text.prompt not in {each.prompt for each in held}}
    else:
        assert {*learned, *held} == {*texts}


def test_texts_are_learned_as_they_were_written(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing between a prompt and its text, no end where a text was cut; ``train --data`` reads the file too."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    options = own.SAMPLING | {"temperature": 1.0, "max_new_tokens": 12}
    prompts = TEXTS[:8] * 6
    job = GenerationJob(Checkpoint.resolve(checkpoint), prompts, speedup=1, options=options)
    texts = own.keep_texts(prompts, job.run().completions, str)
    own.save_texts(tmp_path / "texts.jsonl", texts)
    assert read_examples(tmp_path / "texts.jsonl", JSONL, "train") == texts
    assert {each.cut for each in texts} == {False, True}
    for each, row in zip(texts, encoded(texts, tokenizer, as_written=True), strict=True):
        ends = row["response_ids"][-1:] == [tokenizer.eos_token_id]
        assert ends != each.cut
        ids = [*row["prompt_ids"], *row["response_ids"][: -1 if ends else None]]
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"{each.prompt}{each.references[0]}"


def test_conversations_go_through_the_file(tmp_path: Path) -> None:
    """Line separators in a text are no ends of lines."""
    texts = [Example((Message("user", "a\u2028b"),), ("c\u2028d",)), Example("e", ("f",), cut=True)]
    own.save_texts(tmp_path / "texts.jsonl", texts)
    assert read_examples(tmp_path / "texts.jsonl", JSONL, "train") == texts


class Killed(BaseException):
    """What nothing catches."""


def test_texts_that_a_killed_run_wrote_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    """Killed between two batches, or once all are written: none is written twice."""
    options = own.SAMPLING | {"temperature": 1.0, "max_new_tokens": 6}
    prompts = TEXTS[:6] * 2
    base = Checkpoint.resolve(checkpoint)
    job = GenerationJob(base, prompts, tmp_path / "raw.jsonl", speedup=1, batch_size=4, options=options)
    written: list[int] = []

    class Bar(tqdm):
        def update(self, count: float | None = 1) -> None:
            written.append(int(count or 0))
            if len(written) == 3:  # no text was there, and two batches are written
                raise Killed

    with pytest.raises(Killed):
        own.write_with_job(job, Bar(disable=True))
    assert written == [0, 4, 4]
    found = own.write_with_job(job, Bar(disable=True))
    assert written[3:] == [8, 4]
    assert own.write_with_job(job, Bar(disable=True)) == found
    assert len(written) == 5
    assert [each.text for each in found if each] == GenerationJob(
        base, prompts, speedup=1, batch_size=4, options=options
    ).run().texts
