"""``skipdecode generate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode import generate, load
from skipdecode.errors import UsageError
from skipdecode.generation.job import GenerationJob


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text, "id": i} for i, text in enumerate(TEXTS[:5])])


def test_outputs_are_those_of_the_function(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--speedup", 2, "--max-new-tokens", 6, "--batch-size", 2)
    done = run("generate", checkpoint, "--prompts", prompts, "--output", tmp_path / "out.jsonl", *options, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    model, tokenizer = load(str(checkpoint))
    expected = generate(model, tokenizer, TEXTS[:5], speedup=2, batch_size=2, max_new_tokens=6)
    assert [row["text"] for row in rows] == [each.text for each in expected.completions]
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4]
    assert json.loads(done.stdout.splitlines()[-1])["rows"] == 5


def test_prompts_of_the_command_line_print_texts(checkpoint: Path) -> None:
    done = run("generate", checkpoint, "--prompt", TEXTS[0], "--prompt", TEXTS[1], "--max-new-tokens", 4)
    assert done.returncode == 0, done.stderr
    assert "sequences, 0 bad rows" in done.stderr


def test_a_line_break_stops_an_output(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell gives its two characters."""

    def refuse(job: GenerationJob, **_: Any) -> None:
        raise UsageError(f"asked for {job.options['stop_strings']}")

    monkeypatch.setattr(GenerationJob, "run", refuse)
    done = run("generate", checkpoint, "--prompt", "the cat", "--stop", "\\n", "--stop", "end")
    expected = ["\n", "end"]
    assert f"asked for {expected}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--do-sample", "--temperature", 0), "temperature 0: leave do_sample out"),
        (("--repetition-penalty", 0), "penalty"),
        (("--temperature", 0.5), "need --do-sample"),
        (("--top-p", 0), "need --do-sample"),
        (("--stop", ""), "an empty stop string"),
        (("--device", "bogus"), "this machine has no device bogus"),
        (("--device", "meta"), "this machine has no device meta"),
    ],
)
def test_a_value_is_heeded_or_refused(checkpoint: Path, arguments: tuple[object, ...], match: str) -> None:
    """A nought too."""
    done = run("generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", 2, *arguments)
    assert done.returncode == 2, done.stdout
    assert match in " ".join(done.stderr.split())


def test_one_source_of_prompts(checkpoint: Path, prompts: Path) -> None:
    for arguments in ((), ("--prompts", prompts, "--prompt", "the cat")):
        done = run("generate", checkpoint, *arguments)
        assert done.returncode == 2
        assert "--prompts" in done.stderr


def test_no_usable_row_is_exit_code_1(checkpoint: Path, tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "the cat " * 200}])
    done = run("generate", checkpoint, "--prompts", bad, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 4)
    assert done.returncode == 1
    assert "row 1" in done.stderr
