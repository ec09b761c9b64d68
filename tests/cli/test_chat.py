"""``skipdecode chat``: a conversation on standard input."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers.tiny import run
from skipdecode.data.chat import parse_messages
from skipdecode.data.tokenize import encode_prompts
from skipdecode.generation.generate import generate_ids
from skipdecode.loading.load import Checkpoint
from skipdecode.schedule import choose_schedule

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GREEDY = ("--temperature", 0, "--repetition-penalty", 1, "--max-new-tokens", 5)


@pytest.fixture(scope="module")
def chat_model(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(long_checkpoint, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def answers(folder: Path, turns: list[str], speedup: float) -> list[str]:
    """The answers to ``turns`` by one call on the whole conversation for each."""
    checkpoint = Checkpoint.resolve(str(folder))
    model = checkpoint.load()
    schedule = choose_schedule(checkpoint.schedules, checkpoint.num_layers, speedup)
    messages: list[Any] = []
    found = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = encode_prompts(checkpoint.tokenizer, [parse_messages(messages)])
        output = generate_ids(model, checkpoint.tokenizer, ids, schedule, 1, max_new_tokens=5)
        found.append(output.completions[0].text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


@pytest.mark.parametrize("speedup", [1, 2])
def test_each_answer_is_that_of_the_whole_conversation(chat_model: Path, speedup: float) -> None:
    """The prompt's cache is kept between turns; the output is what one call on everything generates."""
    turns = ["the cat sat", "on a mat", "and saw the dog"]
    done = run("chat", chat_model, "--speedup", speedup, *GREEDY, stdin="\n".join(turns).encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in answers(chat_model, turns, speedup))


def test_commands(chat_model: Path) -> None:
    lines = ["/help", "the cat", "/speed 2", "/speed x", "/new", "the cat", "/quit", "never read"]
    done = run("chat", chat_model, "--speedup", 1, *GREEDY, stdin="\n".join(lines).encode())
    assert done.returncode == 0, done.stderr
    assert "2x from here on" in done.stderr
    assert "/speed takes a number" in done.stderr
    assert "8.0 of 8 layers" in done.stderr
    assert "4.0 of 8 layers" in done.stderr


def test_the_same_seed_gives_the_same_answers(chat_model: Path) -> None:
    once, again = (run("chat", chat_model, "--temperature", 1, "--max-new-tokens", 8, stdin=b"the cat") for _ in "12")
    assert once.stdout == again.stdout


def test_a_model_without_a_template_is_refused(long_checkpoint: Path) -> None:
    done = run("chat", long_checkpoint, stdin=b"hello")
    assert done.returncode == 2
    assert "chat template" in done.stderr
