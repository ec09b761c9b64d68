"""``skipdecode chat``: a conversation on standard input."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers.tiny import run
from skipdecode import generate, load

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


@pytest.mark.parametrize("speedup", [1, 2])
def test_each_answer_is_that_of_the_whole_conversation(chat_model: Path, speedup: float) -> None:
    """The prompt's cache is kept between turns; the output is what one call on everything generates."""
    turns = ["the cat sat", "on a mat", "and saw the dog"]
    done = run("chat", chat_model, "--speedup", speedup, *GREEDY, stdin="\n".join(turns).encode())
    assert done.returncode == 0, done.stderr
    model, tokenizer = load(str(chat_model))
    messages: list[Any] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        (answer,) = generate(model, tokenizer, messages, speedup=speedup, max_new_tokens=5).completions
        messages.append({"role": "assistant", "content": answer.text})
    assert done.stdout == "".join(f"{message['content']}\n" for message in messages[1::2])


def test_commands(chat_model: Path) -> None:
    lines = ["/help", "the cat", "/speed 2", "/speed x", "/new", "the cat", "/quit", "never read"]
    done = run("chat", chat_model, "--speedup", 1, *GREEDY, stdin="\n".join(lines).encode())
    assert done.returncode == 0, done.stderr
    for line in ("2x from here on", "/speed takes a number", "8.0 of 8 layers", "4.0 of 8 layers"):
        assert line in done.stderr
    assert done.stderr.count("layers a step") == 2


def test_the_same_seed_gives_the_same_answers(chat_model: Path) -> None:
    once, again = (run("chat", chat_model, "--temperature", 1, "--max-new-tokens", 8, stdin=b"the cat") for _ in "12")
    assert once.stdout == again.stdout


def test_a_model_without_a_template_is_refused(long_checkpoint: Path) -> None:
    done = run("chat", long_checkpoint, stdin=b"hello")
    assert done.returncode == 2
    assert "chat template" in done.stderr
