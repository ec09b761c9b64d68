"""The recipes: what goes into training is what they say, and nothing of the held-out sets."""

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
from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import get_task
from skipdecode.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"


def run(script: str, *arguments: object, code: int = 0) -> str:
    """Run a script, and return its standard error."""
    done = tiny.run(*arguments, program=partial(runpy.run_path, str(RECIPES / script), run_name="__main__"))
    assert done.returncode == code, done.stderr
    return done.stderr


def write(path: Path, columns: list[str], rows: list[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def read(path: Path) -> list[dict[str, str]]:
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
    seen, held = release(tmp_path)
    run("more_inputs.py", tmp_path, tmp_path / "inputs.csv", 12)
    made = [row["mr"] for row in read(tmp_path / "inputs.csv")]
    distinct = list(dict.fromkeys(seen))
    assert made[: len(distinct)] == distinct
    new = made[len(distinct) :]
    assert len(set(new)) == 12
    assert not set(new) & {*seen, *held}
    assert all(row.startswith("name[A], food[") and ", area[" in row for row in new)


def test_own_texts_stand_beside_references_as_often_as_requested(tmp_path: Path) -> None:
    """Empty outputs are left out."""
    seen, _ = release(tmp_path)
    texts = [
        {"mr": "new", "text": "mine", "tokens": 1, "finish_reason": "stop"},
        {"mr": "empty", "text": " ", "tokens": 1, "finish_reason": "stop"},
    ]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    for times, own in ((1, 3), (0, 1)):
        target = tmp_path / "made.csv"
        run("own_texts.py", tmp_path / "trainset.csv", tmp_path / "texts.jsonl", "ref", target, times, own)
        rows = [(row["mr"], row["ref"]) for row in read(target)]
        assert rows == [(row, f"text of {row}") for row in seen] * times + [("new", "mine")] * own


def test_no_prompt_is_in_both_files(tmp_path: Path) -> None:
    """Prompts repeat; all outputs of a prompt go to one file."""
    rows = [{"prompt": f"p{i % 300}", "text": f"t{i}", "finish_reason": "length"} for i in range(700)]
    write_jsonl(tmp_path / "texts.jsonl", rows)
    run("own_data.py", tmp_path / "texts.jsonl", tmp_path / "data", "--held-out", 40)
    train, validation = (read_examples(tmp_path / "data", get_task(), split) for split in ("train", "validation"))
    prompts = {each.prompt for each in train}, {each.prompt for each in validation}
    assert (len(prompts[0]), len(prompts[1])) == (260, 40)
    assert not prompts[0] & prompts[1]
    assert len(train) + len(validation) == 700
    assert all(each.cut for each in train)


def test_a_new_model_generates(tmp_path: Path) -> None:
    release(tmp_path)
    config = json.loads((RECIPES / "e2e" / "24-layers.json").read_text()) | {"vocab_size": 300, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"word_embed_proj_dim": 32, "ffn_dim": 32}))
    run("new_model.py", tmp_path / "config.json", tmp_path, tmp_path / "new", "--layers", 4)
    done = tiny.run("generate", tmp_path / "new", "--prompt", "name A ->", "--max-new-tokens", 3)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in RECIPES.glob("*.py")))
def test_a_missing_argument_is_a_usage_error(script: str) -> None:
    assert "Missing argument" in run(script, code=2)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_recipes_file_is_a_run(path: Path) -> None:
    TrainConfig.create(path, model="demo", **({"teacher": "demo"} if "teacher" in path.read_text() else {}))


#: Scripts that call verbs: the one for a GPU calls scripts of its own.
VERBS = {*RECIPES.glob("*.sh")} - {RECIPES / "gpu_distill.sh"}


@pytest.mark.parametrize("path", sorted(VERBS), ids=lambda path: path.name)
def test_the_scripts_options_and_files_exist(path: Path) -> None:
    """Options are those of a verb, of shuf or of a recipe."""
    subprocess.run(["bash", "-n", path], check=True)
    line: Any = typer.main.get_command(app)
    every = [each for verb in line.commands.values() for each in verb.params]
    options = {name for each in every for name in (*each.opts, *each.secondary_opts)}
    text = re.sub(r"^\s*#.*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    options |= {"--random-source", "--posts", "--questions", "--summaries"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) <= options
    for name in re.findall(r"recipes/[\w/.-]+\.(?:yaml|json|py|sh)", text):
        assert (ROOT / name).is_file(), name
