"""Tasks: the scorer is the challenge's, prompts are reversible enough to check, wrong data is named."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from skipdecode.tasks import TaskError, get_task

DATA = Path(__file__).parents[2] / "shared" / "data" / "e2e"
needs_e2e = pytest.mark.skipif(
    not DATA.exists(), reason="the E2E release is not beside the checkout (docs/training.md)"
)


@needs_e2e
@pytest.mark.parametrize(("system", "bleu"), [("tgen", 65.93), ("slug", 66.19)])
def test_scorer_gives_the_challenges_official_bleu(system, bleu):
    task = get_task("e2e")
    with (DATA / "challenge_outputs" / f"{system}.tsv").open(encoding="utf-8") as file:
        outputs = {task.prompt({"mr": row["MR"]}): row["output"] for row in csv.DictReader(file, delimiter="\t")}
    examples = task.read(DATA, "test")
    assert len(examples) == 630
    score = task.score([outputs[e.prompt] for e in examples], [e.references for e in examples])
    assert score["bleu"] == pytest.approx(bleu, abs=0.005)


@needs_e2e
def test_e2e_splits_have_the_releases_size():
    task = get_task("e2e")
    assert len(task.read(DATA, "train")) == 42061
    assert sum(len(e.references) for e in task.read(DATA, "validation")) == 4672
    assert sum(len(e.references) for e in task.read(DATA, "test")) == 4693


@pytest.mark.parametrize("mr", ["", "hello", "name[Aromi", "name[Aromi] food", "Aromi]"])
def test_what_is_no_meaning_representation_is_named(mr):
    with pytest.raises(TaskError, match="meaning representation"):
        get_task("e2e").prompt({"mr": mr})


def test_e2e_prompt_keeps_every_attribute():
    mr = "name[The Rice Boat], priceRange[£20-25], customer rating[5 out of 5], familyFriendly[no]"
    expected = "name The Rice Boat, priceRange £20-25, customer rating 5 out of 5, familyFriendly no ->"
    assert get_task("e2e").prompt({"mr": mr}) == expected


def test_jsonl_gathers_references_outside_training(tmp_path):
    rows = [("a", "1"), ("b", "2"), ("a", "3")]
    for name in ("train", "valid"):
        lines = (json.dumps({"prompt": p, "response": r}) for p, r in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    task = get_task("jsonl")
    assert [(e.prompt, e.references) for e in task.read(tmp_path, "train")] == [(p, (r,)) for p, r in rows]
    assert [(e.prompt, e.references) for e in task.read(tmp_path, "validation")] == [("a", ("1", "3")), ("b", ("2",))]


@pytest.mark.parametrize("line", ['{"prompt": "a"}', "[1]", '{"prompt": 1, "response": "x"}', "{"])
def test_training_data_must_be_whole(tmp_path, line):
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(TaskError, match=r"train\.jsonl"):
        get_task("jsonl").read(tmp_path, "train")


def test_unknown_task_and_missing_files_are_named(tmp_path):
    with pytest.raises(TaskError, match="unknown task"):
        get_task("nope")
    with pytest.raises(TaskError, match=r"trainset\.csv"):
        get_task("e2e").read(tmp_path, "train")
    with pytest.raises(TaskError, match=r"train\.jsonl"):
        get_task("jsonl").read(tmp_path, "train")
