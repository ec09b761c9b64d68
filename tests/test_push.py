"""``skipdecode push``: what is uploaded is found again, and works, on a hub of this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.hub import Hub, hub
from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode.loading.load import DEMO

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = [sys.executable, "-m", "skipdecode"]


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for 2x of the tiny checkpoint, with the files of its training. Read it."""
    folder = tmp_path_factory.mktemp("adapter")
    write_jsonl(folder / "prompts.jsonl", ({"prompt": text} for text in TEXTS))
    options = ["--own-texts", 20, "--max-new-tokens", 8, "--speedups", "2,4", "--max-steps", 1]
    done = run("train", checkpoint, *options, "--prompts", folder / "prompts.jsonl", "--output", folder / "fast")
    assert done.returncode == 0, done.stderr
    return folder / "fast"


@pytest.fixture
def served() -> Iterator[Hub]:
    with hub() as made:
        yield made


def call(tmp_path: Path, served: Hub, *command: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that knows this hub alone."""
    places = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_test"}
    environment = os.environ | places | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [*COMMAND, *map(str, command)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_an_adapter_goes_up_and_comes_back(adapter: Path, checkpoint: Path, served: Hub, tmp_path: Path) -> None:
    """Its name on the hub stands for its folder; nothing private goes along; the card says what it is."""
    sent = call(
        tmp_path, served, "push", adapter, "me/fast", "--base-model", "you/base", "--license", "mit", "--private"
    )
    assert sent.returncode == 0, sent.stderr
    assert f"{served.url}/me/fast" in sent.stderr
    files = served.files["me/fast"]
    assert {name for name in files if "/" not in name} == {
        "README.md",
        "adapter.safetensors",
        "skipdecode_adapter.json",
    }
    assert "custom_generate/generate.py" in files
    assert served.private["me/fast"]
    assert str(tmp_path.parent).encode() not in b"".join(files.values())
    card = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert card["base_model"] == "you/base"
    assert card["base_model_relation"] == "adapter"
    assert {"skipdecode", "custom_generate"} <= {*card["tags"]}
    assert "--own-texts 20" in files["README.md"].decode()
    write_jsonl(tmp_path / "in.jsonl", ({"prompt": text} for text in TEXTS[:3]))
    job = ["--input", tmp_path / "in.jsonl", "--max-new-tokens", 6, "--speedup", 2]
    back = call(tmp_path, served, "generate", checkpoint, "--adapter", "me/fast", *job)
    assert back.returncode == 0, back.stderr
    assert back.stdout == run("generate", checkpoint, "--adapter", adapter, *job).stdout
    missing = call(tmp_path, served, "generate", checkpoint, "--adapter", "me/slow", *job)
    assert missing.returncode == 2
    assert "neither in a folder nor on the hub" in missing.stderr


def test_a_checkpoint_goes_up_with_its_results(served: Hub, tmp_path: Path) -> None:
    """The embedded one, with a table as ``evaluate`` writes it: every score is in the metadata, at its speed-up."""
    results = RESULTS / "e2e"
    sent = call(tmp_path, served, "push", DEMO, "me/demo", "--results", results, "--dataset", "tuetschek/e2e_nlg")
    assert sent.returncode == 0, sent.stderr
    card = served.cards[0]
    assert "command: " in (results / "table.md").read_text()
    assert b"command: " not in served.files["me/demo"]["README.md"]
    rows = json.loads((results / "table.json").read_text())["rows"]
    told = {
        (result["dataset"]["args"]["speedup"], metric["type"]): metric["value"]
        for result in card["model-index"][0]["results"]
        for metric in result["metrics"]
    }
    assert told == {
        (row["target"], kind): row[key] for row in rows for key, kind in (("bleu", "bleu"), ("rouge_l", "rouge"))
    }
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "name Zizzi, area riverside ->"}])
    job = ["--input", tmp_path / "in.jsonl", "--max-new-tokens", 20, "--speedup", 5]
    back = call(tmp_path, served, "generate", "me/demo", *job)
    assert back.returncode == 0, back.stderr
    assert back.stdout == run("generate", "demo", *job).stdout


def test_another_models_full_depth_is_not_pushed_as_this_ones(tmp_path: Path) -> None:
    """A checkpoint's 1x is its own; the table's first row may be the base model's."""
    results = shutil.copytree(RESULTS / "e2e", tmp_path / "table")
    table = json.loads((results / "table.json").read_text())
    table["rows"][0]["model"] = "another"
    (results / "table.json").write_text(json.dumps(table))
    other = shutil.copytree(DEMO, tmp_path / "other")
    done = run("push", other, "me/demo", "--results", RESULTS / "e2e", "--prepare", tmp_path / "out")
    assert done.returncode == 2
    assert "has the results of demo, not of other" in done.stderr
    done = run("push", DEMO, "me/demo", "--results", results, "--prepare", tmp_path / "out")
    assert done.returncode == 2
    assert "compares models" in done.stderr


def test_a_models_commit_counts(checkpoint: Path, served: Hub, tmp_path: Path) -> None:
    """Once the hub has other files, an unfinished run is refused that began with the former ones."""
    served.files["you/base"] = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "the", "response": "cat sat"}] * 8)
    learn = ["train", "you/base", "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "out", "--save-steps", 1]
    first = call(tmp_path, served, *learn, "--max-steps", 1, "--batch-size", 2)
    assert first.returncode == 0, first.stderr
    same = call(tmp_path, served, *learn, "--max-steps", 2, "--batch-size", 2)
    assert same.returncode == 0, same.stderr
    served.files["you/base"]["README.md"] = b"another commit"
    other = call(tmp_path, served, *learn, "--max-steps", 3, "--batch-size", 2)
    assert other.returncode == 2
    assert "model" in other.stderr


def test_a_broken_generation_config_on_the_hub_is_no_missing_one(checkpoint: Path, served: Hub, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    served.files["you/none"] = {name: data for name, data in files.items() if name != "generation_config.json"}
    served.files["you/broken"] = files | {"generation_config.json": b"{"}
    write = ["--prompt", TEXTS[0], "--max-new-tokens", 2]
    assert call(tmp_path, served, "generate", "you/none", *write).returncode == 0
    broken = call(tmp_path, served, "generate", "you/broken", *write)
    assert broken.returncode == 2
    assert "generation_config.json cannot be used" in broken.stderr


@pytest.mark.parametrize("learnt", ["all weights", "an adapter that begins with another"])
def test_a_card_names_a_command_that_can_be_typed(learnt: str, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    """With files of one's own in place of the words in capital letters; also once the first adapter is gone."""
    out, data = tmp_path / "out", write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "the", "response": "cat sat"}] * 24)
    options: list[Any] = ["--data", data, "--speedups", "2,3", "--distill-weight", 1, "--teacher", checkpoint]
    places = {"MODEL": checkpoint, "DATA": data, "TEACHER": checkpoint}
    if learnt != "all weights":
        begun, prompts = shutil.copytree(adapter, tmp_path / "begun"), adapter.parent / "prompts.jsonl"
        options = [
            "--adapter",
            begun,
            "--own-texts",
            20,
            "--weights",
            "2,1",
            "--max-new-tokens",
            8,
            "--prompts",
            prompts,
        ]
        places = {"MODEL": checkpoint, "ADAPTER": adapter, "PROMPTS": prompts}
    done = run("train", checkpoint, *options, "--max-steps", 1, "--output", out)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "begun", ignore_errors=True)
    (out / "LICENSES").mkdir()  # a folder whose name is like that of a file to upload
    done = run("push", out, "me/fast", "--base-model", "you/base", "--prepare", tmp_path / "card")
    assert done.returncode == 0, done.stderr
    (line,) = [
        each for each in (tmp_path / "card" / "README.md").read_text().splitlines() if "skipdecode train" in each
    ]
    words = shlex.split(line)[1:]
    assert {word for word in words if word.isupper()} == {*places}
    again = run(*(places.get(word, word) for word in words), "--output", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    weights = "model.safetensors" if learnt == "all weights" else "adapter.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (out / weights).read_bytes()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["me/fast"], "--base-model"),
        (["fast", "--base-model", "you/base"], "USER/NAME"),
        (["me/fast", "--base-model", "/home/me/base"], "--base-model is USER/NAME"),
        (["me/fast", "--base-model", "you/base", "--results", "nowhere"], "nowhere"),
        (["me/fast", "--base-model", "you/base", "--results", RESULTS / "e2e-methods"], "each speed once"),
    ],
)
def test_what_cannot_be_uploaded_is_refused(options: list[Any], why: str, adapter: Path, tmp_path: Path) -> None:
    """With the reason, before anything is sent."""
    done = run("push", adapter, *options, "--prepare", tmp_path / "out")
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "out").exists()
    assert run("push", tmp_path, "me/fast", "--prepare", tmp_path / "out").returncode == 2


def test_a_model_that_skips_nothing_is_no_upload(checkpoint: Path, tmp_path: Path) -> None:
    """A stock checkpoint, or one whose config is damaged."""
    done = run("push", checkpoint, "me/stock", "--prepare", tmp_path / "out")
    assert done.returncode == 2
    assert "was not trained to skip layers" in done.stderr
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    done = run("push", broken, "me/stock", "--prepare", tmp_path / "out")
    assert done.returncode == 2
    assert "config.json cannot be used" in done.stderr
