"""The recipes: what goes into training is what they say, nothing of the held-out sets, and their options are there."""

from __future__ import annotations

import csv
import json
import re
import runpy
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from helpers import tiny
from helpers.tiny import write_jsonl
from skipdecode.cli.main import app
from skipdecode.data.tasks import get_task
from skipdecode.training.config import TrainingPlan

RECIPES = Path(__file__).parents[1] / "recipes"


def run(script: str, *arguments: object, code: int = 0) -> str:
    """One of the scripts, and what it says on standard error."""
    done = tiny.run(*arguments, program=partial(runpy.run_path, str(RECIPES / script), run_name="__main__"))
    assert done.returncode == code, done.stderr
    return done.stderr


def write(path: Path, columns: list[str], rows: list[tuple[str, str]]) -> None:
    """A CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def read(path: Path) -> list[dict[str, str]]:
    """Its rows."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def release(folder: Path) -> tuple[list[str], list[str]]:
    """Ten training inputs with values for 60 others, of which 20 are held out."""
    full = "name[A], food[{}], area[{}]"
    every = [full.format(food, area) for food in "abcdefgh" for area in "ijklmnop"]
    seen = [full.format(*pair) for pair in zip("abcdefgh", "ijklmnop", strict=True)] + ["name[A], food[a]"] * 2
    held = [row for row in every if row not in seen][:20]
    for name, rows in (("trainset", seen), ("devset", held[:10]), ("testset_w_refs", held[10:])):
        write(folder / f"{name}.csv", ["mr", "ref"], [(row, f"text of {row}") for row in rows])
    return seen, held


def test_new_inputs_are_new_and_none_is_held_out(tmp_path: Path) -> None:
    """Training inputs come first, once each; the others are in no set, and in the release's form."""
    seen, held = release(tmp_path)
    run("more_inputs.py", tmp_path, tmp_path / "inputs.csv", 12)
    made = [row["mr"] for row in read(tmp_path / "inputs.csv")]
    distinct = list(dict.fromkeys(seen))
    assert made[: len(distinct)] == distinct
    new = made[len(distinct) :]
    assert len(set(new)) == 12
    assert not set(new) & {*seen, *held}
    assert all(row.startswith("name[A], food[") and ", area[" in row for row in new)  # in the release's order


def test_own_texts_stand_beside_peoples_as_often_as_asked(tmp_path: Path) -> None:
    """Empty texts are left out."""
    seen, _ = release(tmp_path)
    texts = [{"mr": "new", "text": "mine", "tokens": 1}, {"mr": "empty", "text": " "}]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    for times, own in ((1, 3), (0, 1)):
        target = tmp_path / "made.csv"
        run("own_texts.py", tmp_path / "trainset.csv", tmp_path / "texts.jsonl", "ref", target, times, own)
        rows = [(row["mr"], row["ref"]) for row in read(target)]
        assert rows == [(row, f"text of {row}") for row in seen] * times + [("new", "mine")] * own


@pytest.mark.parametrize("prompt", ["name[A]", [{"role": "user", "content": "name[A]"}]])
def test_own_texts_of_jsonl_can_be_trained_on(prompt: Any, tmp_path: Path) -> None:
    """N3: the prompts stay, as texts or as messages; without a column of them the recipe says so."""
    people = [{"id": 1, "prompt": prompt, "response": "a place"}]
    texts = [{"prompt": prompt, "text": "mine", "tokens": 1, "finish_reason": "stop"}]
    for name, rows in (("train", people), ("texts", texts)):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    files = (tmp_path / "train.jsonl", tmp_path / "texts.jsonl")
    run("own_texts.py", *files, "response", tmp_path / "own.jsonl", 1, 2)
    examples = get_task("jsonl").read(tmp_path / "own.jsonl", "train")
    assert [example.references for example in examples] == [("a place",), ("mine",), ("mine",)]
    assert not any(example.cut for example in examples)
    write_jsonl(tmp_path / "texts.jsonl", [*texts, texts[0] | {"text": "mine that", "finish_reason": "length"}])
    run("own_texts.py", *files, "response", tmp_path / "cut.jsonl", 1, 1)
    assert [each.cut for each in get_task("jsonl").read(tmp_path / "cut.jsonl", "train")] == [False, False, True]
    assert len({repr(example.prompt) for example in examples}) == 1
    run("own_texts.py", *files, "ref", "no.jsonl", "0", "1", code=2)


def test_no_prompt_that_is_held_out_is_learnt_from(checkpoint: Path, tmp_path: Path) -> None:
    """Prompts come again when all had their turn; their later texts are left out too."""
    prompts = [{"prompt": f"name[{i}]"} for i in range(300)]
    write_jsonl(tmp_path / "prompts.jsonl", prompts)
    options = ("--prompts", tmp_path / "prompts.jsonl", "--count", 700, "--max-new-tokens", 4)
    run("own_data.py", checkpoint, tmp_path / "data", *options)
    splits = {
        split: [json.loads(line)["prompt"] for line in (tmp_path / "data" / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation", "test")
    }
    assert min(map(len, splits.values())) > 0
    assert len(splits["train"]) > len(set(splits["train"])) > 0
    assert not set(splits["train"]) & {*splits["validation"], *splits["test"]}


@pytest.mark.parametrize("script", sorted(path.name for path in RECIPES.glob("*.py")))
def test_a_missing_word_is_a_usage_error(script: str) -> None:
    """Exit code 2 with the name of what is missing, no traceback."""
    assert "Missing argument" in run(script, code=2)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipes_file_is_a_plan(path: Path) -> None:
    """Its keys and values are options of a run; a model from scratch has its config."""
    scratch = "from_config:" in path.read_text(encoding="utf-8")
    plan = TrainingPlan.load(path, **({} if scratch else {"model": "demo"}))
    assert not plan.from_config or (RECIPES.parent / plan.from_config).is_file()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.sh")), ids=lambda path: path.name)
def test_the_scripts_options_and_files_are_there(path: Path) -> None:
    """bash can read it; options are those of a verb, of shuf, or of a recipe it runs; every file of recipes exists."""
    subprocess.run(["bash", "-n", path], check=True)
    line: Any = typer.main.get_command(app)
    every = [each for verb in line.commands.values() for each in verb.params]
    options = {name for each in every for name in (*each.opts, *each.secondary_opts)}
    text = re.sub(r"^\s*#.*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    options |= {"--random-source", "--count", "--posts", "--questions", "--summaries"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) <= options
    for name in re.findall(r"recipes/[\w/.-]+\.(?:yaml|json|py|sh)", text):
        assert (RECIPES.parent / name).is_file(), name
