"""``skipdecode chat``: each answer is what one call on the whole conversation writes, at the speed of the moment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, TextStreamer

from helpers.tiny import TEXTS, run, save_checkpoint
from skipdecode import Schedule, generate, load
from skipdecode.data.chat import Message
from skipdecode.model.config import to_config_entry

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer has a chat template."""
    made = save_checkpoint(tmp_path_factory.mktemp("chat") / "model", positions=128)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return made


def expected(folder: Path, turns: list[tuple[str, float]], system: str | None = None) -> list[str]:
    """The answers of calls on the whole conversation, each at its own speed-up."""
    model, tokenizer = load(str(folder), dtype="float32")
    messages = [] if system is None else [Message("system", system)]
    answers = []
    for said, speedup in turns:
        messages.append(Message("user", said))
        made = generate(model, tokenizer, [tuple(messages)], speedup=speedup, max_new_tokens=NEW)
        answers.append(made.completions[0].text)
        messages.append(Message("assistant", answers[-1]))
    return answers


def talk(folder: Path, *lines: str, options: tuple[Any, ...] = ()) -> Any:
    """A conversation from standard input."""
    typed = "".join(f"{line}\n" for line in lines).encode()
    return run("chat", folder, "--dtype", "float32", "--max-new-tokens", NEW, *options, stdin=typed)


def lines_of(text: str) -> list[str]:
    """Answers, one a line."""
    return [line.strip() for line in text.splitlines()]


def test_answers_are_those_of_one_call(folder: Path) -> None:
    """Over turns, with another speed in between; an empty line, a wrong command and a wrong speed change nothing."""
    said = [
        TEXTS[0],
        "",
        "/speed fast",
        "/speed 99",
        "/nothing",
        "/speed 4",
        TEXTS[1],
        "/speed 1",
        TEXTS[2],
        "/quit",
        "more",
    ]
    done = talk(folder, *said, options=("--speedup", 2, "--system", "the cat"))
    assert done.returncode == 0, done.stderr
    turns = [(TEXTS[0], 2.0), (TEXTS[1], 4.0), (TEXTS[2], 1.0)]
    assert lines_of(done.stdout) == expected(folder, turns, "the cat")
    assert "/speed takes a number" in done.stderr
    assert "99" in done.stderr
    assert done.stderr.count("not trained to skip") == 2  # at 2x and at 4x
    assert "of 8 layers a step" in done.stderr


def test_each_speed_says_what_it_costs(folder: Path) -> None:
    """A model that was not trained to skip; at full depth nothing is to be said."""
    done = talk(folder, TEXTS[0], "/speed 1.2", "/speed 4", TEXTS[1], options=("--speedup", 1))
    assert done.returncode == 0, done.stderr
    before, after = done.stderr.split("1.2x from here on")
    mild, severe = after.split("4x from here on")
    assert [each.count("not trained to skip") for each in (before, mild, severe)] == [0, 1, 1]
    assert "expect no readable text" in severe


def test_a_new_conversation_forgets(folder: Path) -> None:
    """And what was told before it stays."""
    done = talk(folder, TEXTS[0], "/new", TEXTS[1], options=("--speedup", 2))
    first, second = (expected(folder, [(text, 2.0)])[0] for text in TEXTS[:2])
    assert lines_of(done.stdout) == [first, second]


def test_an_answer_can_be_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the answer, not the conversation, which goes on with what was written."""
    put, count = TextStreamer.put, 0

    def interrupted(self: Any, value: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    done = talk(folder, TEXTS[0], TEXTS[1], options=("--speedup", 2))
    assert done.returncode == 0, done.stderr
    assert "stopped" in done.stderr
    first, second = lines_of(done.stdout)
    assert expected(folder, [(TEXTS[0], 2.0)])[0].startswith(first)
    model, tokenizer = load(str(folder), dtype="float32")
    messages = (Message("user", TEXTS[0]), Message("assistant", first), Message("user", TEXTS[1]))
    assert second == generate(model, tokenizer, [messages], speedup=2, max_new_tokens=NEW).completions[0].text


def test_a_full_conversation_is_said(folder: Path) -> None:
    """Rather than cut in silence."""
    done = talk(folder, " ".join(TEXTS * 3), TEXTS[0], options=("--speedup", 2))
    assert "fills the model's 128 positions: /new begins anew" in done.stderr
    assert len(lines_of(done.stdout)) == 1


def test_a_line_that_is_no_text_is_refused_alone(folder: Path) -> None:
    """And the conversation goes on; what the model is told before it is refused at once."""
    typed = b"mat\xe9\n" + f"{TEXTS[0]}\n".encode()
    words = ("chat", folder, "--dtype", "float32", "--max-new-tokens", NEW, "--speedup", 2)
    done = run(*words, stdin=typed)
    assert done.returncode == 0, done.stderr
    assert "that line is not UTF-8" in done.stderr
    assert lines_of(done.stdout) == expected(folder, [(TEXTS[0], 2.0)])
    refused = talk(folder, TEXTS[0], options=("--system", "mat\udce9"))
    assert refused.returncode == 2
    assert "--system is not UTF-8" in refused.stderr


def test_an_answer_names_the_speed_that_was_asked_for(folder: Path, tmp_path: Path) -> None:
    """Not what its schedule comes to; without one, the checkpoint's fastest."""
    done = talk(folder, TEXTS[0], "/speed 3", TEXTS[0], options=("--speedup", 2.7))
    assert [line.split(":")[0] for line in done.stderr.splitlines() if "tokens/s" in line] == ["2.7x", "3x"]
    trained = tmp_path / "model"
    shutil.copytree(folder, trained)
    config = json.loads((trained / "config.json").read_text())
    fast = Schedule(8, 3, 2, horizon=6)
    assert fast.target != 4
    config["skipdecode"] = to_config_entry({4.0: fast})
    (trained / "config.json").write_text(json.dumps(config))
    assert talk(trained, TEXTS[0]).stderr.count("4x:") == 1
    one = run("generate", trained, "--prompt", TEXTS[0], "--max-new-tokens", NEW)
    assert "target 4x" in one.stderr


def test_a_model_without_a_chat_template_is_refused(checkpoint: Path) -> None:
    """Before its weights are loaded."""
    done = talk(checkpoint, "hello")
    assert done.returncode == 2
    assert "no chat template" in done.stderr
