"""The ways in that people reach for: one prompt, messages, stop strings, jobs from Python, rules that hold for both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from skipdecode.generation.journal import Journal
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import skipdecode
from helpers.tiny import TEXTS, run, save_checkpoint
from skipdecode.errors import FileError, ModelError, UsageError
from skipdecode.generation import engine, options
from skipdecode.generation.job import GenerationJob
from skipdecode.model.cache_name import CACHE

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKED = [{"role": "user", "content": "the cat"}]
WRITTEN = "user: the cat\nassistant: "

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer has a chat template."""
    path = save_checkpoint(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    """It, loaded."""
    return skipdecode.load(str(folder), device="cpu")


def texts(loaded: Loaded, prompts: Any, **decoding: Any) -> list[str]:
    """What is written for prompts at 4x."""
    result = skipdecode.generate(*loaded, prompts, speedup=4, **{"max_new_tokens": 8} | decoding)
    return [completion.text for completion in result.completions]


def test_a_text_a_conversation_or_a_list_of_either(loaded: Loaded) -> None:
    """Messages are what their template writes; a list mixes both; left-padded rows are the rows alone."""
    [expected], [cat] = texts(loaded, WRITTEN), texts(loaded, "the cat")
    assert texts(loaded, ASKED) == [expected]
    assert texts(loaded, [ASKED, "the cat", WRITTEN]) == [expected, cat, expected]
    system = [{"role": "system", "content": "be brief"}, *ASKED]
    assert texts(loaded, [system, ASKED])[0] == texts(loaded, f"system: be brief\n{WRITTEN}")[0]


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([[{"role": "user"}]], "prompt 0: message 1"),
        (["the cat", [{"content": "x"}]], "prompt 1: message 1 has no role"),
        ([[{"role": "user", "content": [{"type": "image"}]}]], "content is not a string"),
        ([[]], "prompt 0 is neither a text nor a list of messages"),
    ],
)
def test_messages_that_are_none_are_refused_by_their_index(loaded: Loaded, prompts: Any, match: str) -> None:
    """As texts are."""
    with pytest.raises(UsageError, match=match):
        texts(loaded, prompts)


def test_messages_need_a_template(tmp_path: Path) -> None:
    """A tokenizer without one is told what to do, from Python and the command line."""
    plain = save_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="no chat template"):
        skipdecode.generate(*skipdecode.load(str(plain), device="cpu"), ASKED)
    done = run("generate", plain, "--prompt", "the cat", "--chat", "--max-new-tokens", 4)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no chat template" in done.stderr
    assert "Loading weights" not in done.stderr


def test_one_prompt_is_answered_with_its_text_alone(folder: Path, loaded: Loaded) -> None:
    """``--prompt``, once or more; with ``--chat`` it is a user's message; in a file the output is JSONL as ever."""
    common = ("generate", folder, "--speedup", 4, "--max-new-tokens", 8)
    done = run(*common, "--prompt", "the cat", "--prompt", "a small old house by")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == texts(loaded, ["the cat", "a small old house by"])
    assert run(*common, "--prompt", "the cat", "--chat").stdout == f"{texts(loaded, WRITTEN)[0]}\n"
    target = folder / "out.jsonl"
    assert run(*common, "--prompt", "the cat", "--output", target).returncode == 0
    assert json.loads(target.read_text())["prompt"] == "the cat"
    both = run(*common, "--prompt", "the cat", "--input", target)
    assert both.returncode == 2
    assert "one of --prompt and --input" in both.stderr


def test_a_text_ends_at_a_stop_string(folder: Path, loaded: Loaded) -> None:
    """``--stop`` and ``stop_strings`` are the same; what is behind the string is not written."""
    [free] = texts(loaded, "the cat", max_new_tokens=30)
    stop = next(letter for letter in free if letter.isascii())
    [ended] = texts(loaded, "the cat", max_new_tokens=30, stop_strings=[stop])
    assert ended.endswith(stop)
    assert len(ended) < len(free)
    assert texts(loaded, "the cat", max_new_tokens=30, stop_strings=stop) == [ended]
    done = run("generate", folder, "--speedup", 4, "--max-new-tokens", 30, "--prompt", "the cat", "--stop", stop)
    assert done.stdout.strip() == ended


def test_greedy_or_sampling_is_one_rule(folder: Path, loaded: Loaded) -> None:
    """Greedy unless do_sample is given, whatever the checkpoint asks for; what says how to sample goes with it."""
    model, _ = loaded
    greedy = texts(loaded, TEXTS[:3])
    model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
    try:
        assert texts(loaded, TEXTS[:3]) == greedy
    finally:
        model.generation_config.do_sample, model.generation_config.temperature = False, None
    for name in options.SAMPLING:
        with pytest.raises(UsageError, match=rf"sampling options \({name}\) need do_sample"):
            texts(loaded, "the cat", **{name: 0.5})
    done = run("generate", folder, "--temperature", 0.5, "--prompt", "the cat")
    assert done.returncode == 2
    assert "sampling options (temperature) need do_sample" in done.stderr


def test_a_job_from_python_is_that_of_the_command_line(folder: Path, tmp_path: Path) -> None:
    """The same rows and figures, the same refusals; what is written is not written twice."""
    source, ours, theirs = tmp_path / "in.jsonl", tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    rows = [{"prompt": text} for text in TEXTS[:5]] + [{"messages": ASKED}, {"prompt": "the " * 200}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    decoding = {"max_new_tokens": 6, "do_sample": True, "top_k": 5}
    job = GenerationJob(str(folder), str(source), ours, speedup=4, batch_size=2, seed=3, options=decoding)
    told: list[Any] = []
    result = job.run(on_start=lambda *counts: told.append(counts), on_batch=lambda cost: told.append(cost.rows))
    assert told == [(6, 0), 2, 2, 2]
    arguments = ("--speedup", 4, "--batch-size", 2, "--seed", 3, "--max-new-tokens", 6, "--do-sample", "--top-k", 5)
    done = run("generate", folder, "--input", source, "--output", theirs, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert ours.read_text() == theirs.read_text() == result.jsonl
    timeless = {
        "rows",
        "tokens",
        "average_depth",
        "layer_ratio",
        "peak_kv_bytes",
        "bad_rows",
        "target_speedup",
        "target_of",
        "layers",
    }
    summary = json.loads(done.stdout.splitlines()[-1])
    assert {k: summary[k] for k in timeless} == {k: result.summary[k] for k in timeless}
    assert summary["bad_rows"] == 1
    assert "too long: " in str(result.items[-1].error)
    assert [item.error for item in result.items[:-1]] == [None] * 6
    with pytest.raises(FileError, match="already there"):
        job.run()
    with Journal(ours, "other"), pytest.raises(UsageError, match="in use"):
        job.run()


def test_rows_are_judged_before_weights_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no row that can be written, no weights are read, and the rows say why."""
    monkeypatch.setattr(engine, "load", lambda *a, **k: pytest.fail("weights were loaded"))
    result = GenerationJob(str(folder), ["the " * 200, ""], options={"max_new_tokens": 4}).run()
    assert [bool(item.error) for item in result.items] == [True, True]
    assert result.summary["rows"] == 0
    done = run("generate", folder, "--prompt", "the " * 200)
    assert done.returncode == 1
    assert "too long: " in done.stderr


def test_the_version_is_printed() -> None:
    """It is that of the package."""
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"skipdecode {skipdecode.__version__}\n")


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        ([], {}, "no prompts were given"),
        (["the cat", 7], {}, "prompt 1 is neither a text nor a list of messages"),
        (["\ud800"], {}, "lone surrogate"),
        (["the cat"], {"max_length": 15}, "give max_new_tokens"),
        (["the cat"], {"use_cache": False}, "use_cache=False: each batch has a cache"),
        (["the cat"], {"no_such_option": 1}, "model.generate has no option no_such_option"),
        (["the cat"], {"stop_strings": [""]}, "an empty stop string"),
        (["the cat"], {"stop_strings": ""}, "an empty stop string"),
        (["the cat"], {"max_new_tokens": 0}, "max_new_tokens is a number of tokens, 1 or more, not 0"),
        (["the cat"], {"max_new_tokens": "8"}, "max_new_tokens is a number of tokens, 1 or more, not '8'"),
        (["the cat"], {"length_penalty": 2.0}, "length_penalty goes with num_beams"),
    ],
)
def test_what_a_job_cannot_mean_is_refused_before_weights_are_loaded(
    folder: Path, prompts: Any, options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are checked as those of ``skipdecode.generate`` are, options with the checkpoint's own."""
    monkeypatch.setattr(engine, "load", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(UsageError, match=match):
        GenerationJob(str(folder), prompts, speedup=2, options=options).run()


@pytest.mark.parametrize(
    "options",
    [{"schedule": {"num_layers": 8}}, {"profile": {}, "clock": "job", "speedup": 2}],
    ids=["schedule", "profile"],
)
def test_a_job_takes_schedules_and_profiles_or_their_paths(folder: Path, options: dict[str, Any]) -> None:
    """Nothing else stands for them, so that nothing else is run in their place."""
    with pytest.raises(UsageError, match=r"is a (Schedule|Profile) or the path of its JSON file"):
        GenerationJob(str(folder), ["the cat"], **options)


def test_zero_is_an_options_value(folder: Path) -> None:
    """``--top-k 0`` takes all tokens; transformers' default is 50."""
    common = (
        "generate",
        folder,
        "--prompt",
        "the cat",
        "--do-sample",
        "--seed",
        2,
        "--temperature",
        3,
        "--max-new-tokens",
        30,
    )
    every, fifty = run(*common, "--top-k", 0), run(*common)
    assert every.returncode == fifty.returncode == 0
    assert every.stdout != fifty.stdout


def test_beams_of_the_checkpoint_count(loaded: Loaded) -> None:
    """A length penalty goes with beams that the checkpoint's generation_config asks for."""
    model, _ = loaded
    model.generation_config.num_beams = 2
    try:
        assert texts(loaded, "the cat", length_penalty=2.0)
    finally:
        model.generation_config.num_beams = 1


def test_prompts_of_a_job_are_the_tasks(folder: Path) -> None:
    """``--task`` and ``--prompt-share`` mean for ``--prompt`` what they mean for the lines of a text file."""
    common = ("generate", folder, "--max-new-tokens", 4)
    (folder / "mr.txt").write_text("name[A], food[B]\n")
    for task, text in (("e2e", "name[A], food[B]"), ("jsonl", "the cat sat on")):
        (folder / "lines.txt").write_text(f"{text}\n")
        options = ("--task", task, *(("--prompt-share", 0.5) if task == "jsonl" else ()))
        line = run(*common, *options, "--input", folder / "lines.txt")
        prompt = run(*common, *options, "--prompt", text)
        assert prompt.stdout.strip() == json.loads(line.stdout)["text"]
    wrong = run(*common, "--task", "e2e", "--prompt", "no meaning")
    assert wrong.returncode == 1
    assert "not a meaning representation" in wrong.stderr


def test_messages_come_back_as_they_can_be_read_again(folder: Path) -> None:
    """In the output a conversation is a list of role and content, whoever gave it."""
    result = GenerationJob(str(folder), [ASKED], chat=True, options={"max_new_tokens": 2}).run()
    assert json.loads(result.jsonl)["prompt"] == ASKED


def test_paths_may_be_strings(folder: Path, tmp_path: Path) -> None:
    """Of the input, the output and the schedule; a finished job read again holds its texts."""
    (tmp_path / "in.txt").write_text("the cat\n")
    skipdecode.Schedule(8, 4, 2, 6).save(tmp_path / "schedule.json")
    source, output = str(tmp_path / "in.txt"), str(tmp_path / "out.jsonl")
    schedule = str(tmp_path / "schedule.json")
    result = GenerationJob(str(folder), source, output, schedule=schedule, options={"max_new_tokens": 2}).run()
    assert result.summary["layer_ratio"] == 2
    assert (tmp_path / "out.jsonl").read_text() == result.jsonl


def test_one_conversation_that_the_template_refuses_is_a_bad_row(folder: Path, tmp_path: Path) -> None:
    """Alone too: it is reported with its line."""
    (tmp_path / "m").mkdir()
    for path in folder.glob("*.*"):
        (tmp_path / "m" / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ raise_exception('no such role') if messages[0].role != 'user' }}" + TEMPLATE
    tokenizer.save_pretrained(tmp_path / "m")
    result = GenerationJob(
        str(tmp_path / "m"), [[{"role": "tool", "content": "x"}]], options={"max_new_tokens": 2}
    ).run()
    assert "no such role" in str(result.items[0].error)


def test_what_is_not_there_is_not_called_empty(folder: Path, tmp_path: Path) -> None:
    """A missing file is named as missing, a file in the place of a folder as a file; before weights are loaded."""
    (tmp_path / "file").write_text("x")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "the cat", "response": "sat"}) + "\n")
    for arguments, words in (
        (("evaluate", folder, "--data", tmp_path / "none.jsonl"), "there is no "),
        (("calibrate", folder, "--data", tmp_path / "none.jsonl", "--output", tmp_path / "s.json"), "there is no "),
        (("train", folder, "--data", tmp_path / "none"), "there is no "),
        (("evaluate", folder, "--data", rows, "--output", tmp_path / "file"), "is a file: give a folder"),
        (("train", folder, "--data", rows, "--output", tmp_path / "file"), "is a file: give a folder"),
        (("train", folder, "--data", rows, "--horizon", 4, "--lengths", 3), "give one of them"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert words in done.stderr
        assert "Loading weights" not in done.stderr


def test_none_is_no_option(loaded: Loaded) -> None:
    """An option that is refused may be None: nothing is asked for."""
    assert texts(loaded, "the cat", **{CACHE: None}, attention_mask=None) == texts(loaded, "the cat")
