"""A model card: what a reader and the Hub learn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from skipdecode import Schedule
from skipdecode.errors import FileError
from skipdecode.hub.card import model_card

SCHEDULES = {1.0: Schedule.full(24), 1.5: Schedule(24, 16, 16, 1, decay="constant"), 3.0: Schedule(24, 10, 6, 32)}


def results(folder: Path, *rows: dict[str, Any]) -> Path:
    """A folder as ``skipdecode evaluate`` writes it."""
    folder.mkdir()
    (folder / "table.json").write_text(json.dumps({"about": {"rows": "630 test inputs of e2e"}, "rows": rows}))
    (folder / "table.md").write_text(
        "| speed-up | BLEU |\n\ncommand: skipdecode evaluate /home/me/model  \nclock: quiet\n"
    )
    return folder


ROWS: list[dict[str, Any]] = [
    {"model": "base", "target": 1.0, "bleu": 67.4, "kl": 0.0},
    {"model": "fast", "target": 1.5, "bleu": 67.12345, "kl": 0.217, "seconds": 3},
    {"model": "fast", "target": 3.0, "bleu": 66.0, "kl": 0.467},
]


def test_an_adapters_card_names_its_base_and_how_to_run_it() -> None:
    card = model_card(
        "me/fast", SCHEDULES, is_adapter=True, base_model="you/base", trained_with="skipdecode distill MODEL"
    )
    data = yaml.safe_load(str(card).split("---")[1])
    assert data["base_model"] == "you/base"
    assert data["base_model_relation"] == "adapter"
    assert {"skipdecode", "custom_generate"} <= {*data["tags"]}
    assert "16 of 24 layers at 1.5x, 10 to 6 of 24 layers at 3x" in card.text
    assert '"custom_generate": "me/fast", "trust_remote_code": True, "speedup": 1.5, "adapter": "me/fast"}' in card.text
    assert 'from_pretrained("you/base")' in card.text
    assert "skipdecode serve you/base --adapter me/fast" in card.text
    assert "## Training\n\n    skipdecode distill MODEL" in card.text
    assert "## Evaluation" not in card.text


def test_a_checkpoints_card_stands_alone() -> None:
    card = model_card("me/demo", SCHEDULES, is_adapter=False)
    assert "base_model" not in yaml.safe_load(str(card).split("---")[1])
    assert 'from_pretrained("me/demo")' in card.text
    assert "adapter me/demo" not in card.text


def test_every_score_is_in_the_metadata_at_its_speed(tmp_path: Path) -> None:
    """The table is on the card without its command, which names the user's folders."""
    folder = results(tmp_path / "results", *ROWS)
    (folder / "tradeoff.png").write_bytes(b"")
    card = model_card("me/fast", SCHEDULES, is_adapter=True, base_model="you/base", results=folder)
    index = yaml.safe_load(str(card).split("---")[1])["model-index"][0]
    found = {
        (result["dataset"]["args"]["speedup"], metric["type"]): metric["value"]
        for result in index["results"]
        for metric in result["metrics"]
    }
    assert found[1.5, "bleu"] == 67.123
    assert found == {(row["target"], key): round(row[key], 3) for row in ROWS for key in ("bleu", "kl")}
    assert "![quality against speed](tradeoff.png)" in card.text
    assert "| speed-up | BLEU |" in card.text
    assert "clock: quiet" in card.text
    assert "/home/me" not in card.text


@pytest.mark.parametrize("more", [{"model": "other", "target": 2.0}, {"model": "fast", "target": 3.0}])
def test_a_card_takes_one_model_each_speed_once(more: dict[str, Any], tmp_path: Path) -> None:
    folder = results(tmp_path / "results", *ROWS, more)
    with pytest.raises(FileError, match="one model, each speed once"):
        model_card("me/fast", SCHEDULES, is_adapter=False, results=folder)


def test_a_folder_without_an_evaluation_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"table\.json"):
        model_card("me/fast", SCHEDULES, is_adapter=False, results=tmp_path)
