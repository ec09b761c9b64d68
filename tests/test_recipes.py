"""The recipes' own scripts: what goes into training is what they say, and nothing of the held-out sets."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"


def run(script, *arguments):
    subprocess.run([sys.executable, RECIPES / script, *map(str, arguments)], check=True)


def write(path, columns, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def release(folder):
    """Ten training inputs with values for 60 others, of which 20 are held out."""
    full = "name[A], food[{}], area[{}]"
    every = [full.format(food, area) for food in "abcdefgh" for area in "ijklmnop"]
    seen = [full.format(*pair) for pair in zip("abcdefgh", "ijklmnop", strict=True)] + ["name[A], food[a]"] * 2
    held = [row for row in every if row not in seen][:20]
    for name, rows in (("trainset", seen), ("devset", held[:10]), ("testset_w_refs", held[10:])):
        write(folder / f"{name}.csv", ["mr", "ref"], [(row, f"text of {row}") for row in rows])
    return seen, held


def test_new_inputs_are_new_and_none_is_held_out(tmp_path):
    seen, held = release(tmp_path)
    run("more_inputs.py", tmp_path, tmp_path / "inputs.csv", 12)
    made = [row["mr"] for row in read(tmp_path / "inputs.csv")]
    distinct = list(dict.fromkeys(seen))
    assert made[: len(distinct)] == distinct
    new = made[len(distinct) :]
    assert len(set(new)) == 12
    assert not set(new) & {*seen, *held}
    assert all(row.startswith("name[A], food[") and ", area[" in row for row in new)  # in the release's order


def test_own_texts_stand_beside_peoples_as_often_as_asked(tmp_path):
    seen, _ = release(tmp_path)
    texts = [{"mr": "new", "text": "mine", "tokens": 1}, {"mr": "empty", "text": " "}]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    for times, own in ((1, 3), (0, 1)):
        target = tmp_path / "made.csv"
        run("own_texts.py", tmp_path / "trainset.csv", tmp_path / "texts.jsonl", "ref", target, times, own)
        rows = [(row["mr"], row["ref"]) for row in read(target)]
        assert rows == [(row, f"text of {row}") for row in seen] * times + [("new", "mine")] * own


def test_whole_posts_lose_no_word(tmp_path):
    post = {"title": "Help", "post": "one two\nthree four", "summary": "short"}
    (tmp_path / "train.jsonl").write_text(json.dumps(post) + "\n", encoding="utf-8")
    run("whole_posts.py", tmp_path / "train.jsonl", tmp_path / "posts.jsonl", 3)
    rows = [json.loads(line) for line in (tmp_path / "posts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["response"] for row in rows] == ["Help. one two three TL;DR: short", "four"]


def test_what_stands_after_the_tldr_of_a_copy_stands_before_it(tmp_path):
    posts = [
        {"title": f"Title\n{i}", "post": " ".join(f"w{j}" for j in range(1, 10 * i)), "summary": "s"} for i in range(5)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(post) + "\n" for post in posts), encoding="utf-8")
    run("copies.py", tmp_path / "train.jsonl", tmp_path / "copies.jsonl", tmp_path / "titles.jsonl", 2)
    titles = [json.loads(line) for line in (tmp_path / "titles.jsonl").read_text(encoding="utf-8").splitlines()]
    assert titles == [post | {"summary": post[key]} for post in posts for key in ("summary", "title")]
    rows = [
        json.loads(line)["response"] for line in (tmp_path / "copies.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == len(posts) * 3 * 2
    for row in rows:
        shown, again = row.split(" TL;DR:")
        assert f"{shown} ".startswith(f"{again.strip()} ") or shown.startswith(f"{again.strip()}. ")
