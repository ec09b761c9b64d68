"""A model card: what a reader and the Hub learn from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from skipdecode import Schedule
from skipdecode.hub.card import model_card

SCHEDULES = {1.0: Schedule.full(24), 1.5: Schedule(24, 16, 16, 1, decay="constant"), 3.0: Schedule(24, 10, 6, 32)}


def test_an_adapters_card_names_its_base_and_how_to_run_it() -> None:
    card = model_card("me/fast", SCHEDULES, is_adapter=True, base_model="you/base")
    data = yaml.safe_load(str(card).split("---")[1])
    assert data["base_model"] == "you/base"
    assert data["base_model_relation"] == "adapter"
    assert {"skipdecode", "custom_generate"} <= {*data["tags"]}
    assert "16 of 24 layers at 1.5x, 10 to 6 of 24 layers at 3x" in card.text
    assert '"custom_generate": "me/fast", "trust_remote_code": True, "speedup": 1.5, "adapter": "me/fast"}' in card.text
    assert 'from_pretrained("you/base")' in card.text
    assert "skipdecode serve you/base --adapter me/fast" in card.text
    assert "## Evaluation" not in card.text


def test_a_checkpoints_card_stands_alone() -> None:
    card = model_card("me/demo", SCHEDULES, is_adapter=False)
    assert "base_model" not in yaml.safe_load(str(card).split("---")[1])
    assert 'from_pretrained("me/demo")' in card.text
    assert "adapter me/demo" not in card.text


def test_an_evaluations_table_is_on_the_card(tmp_path: Path) -> None:
    """Without its command, which names the user's folders."""
    (tmp_path / "tradeoff.png").write_bytes(b"")
    table = "| speed-up | BLEU |\n\ncommand: skipdecode evaluate /home/me/model  \nclock: quiet\n"
    (tmp_path / "table.md").write_text(table)
    card = model_card("me/fast", SCHEDULES, is_adapter=True, base_model="you/base", results=tmp_path)
    assert "![quality against speed](tradeoff.png)" in card.text
    assert "| speed-up | BLEU |" in card.text
    assert "clock: quiet" in card.text
    assert "/home/me" not in card.text


def test_a_folder_without_an_evaluation_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"table\.md"):
        model_card("me/fast", SCHEDULES, is_adapter=False, results=tmp_path)
