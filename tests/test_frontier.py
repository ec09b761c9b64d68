"""benchmarks/frontier.py on a tiny model: every way is asked, and judged by the model at full depth."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import frontier
from helpers.tiny import TEXTS, write_jsonl
from skipdecode import Schedule, load
from skipdecode.errors import UsageError
from skipdecode.model.adapter import ABOUT, Adapter, save_adapter
from skipdecode.model.inspect import text_config


@pytest.mark.parametrize("names", [["--pruned", "int8=A"], ["--pruned", "x=A", "--pruned", "x=B"]])
def test_each_way_has_a_name_of_its_own(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Else it would be asked of another one's process."""
    (tmp_path / ABOUT).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["frontier", str(checkpoint), str(tmp_path), *names])
    monkeypatch.setattr(frontier, "read_schedules", lambda folder: {})
    with pytest.raises(UsageError, match="names of its own"):
        frontier.main()


@pytest.mark.slow
def test_every_way_is_asked_and_judged(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that take one row at a time have no figure for more; ratios are to the first way, in the same rounds."""
    model, tokenizer = load(str(checkpoint))
    config = text_config(model.config)
    adapter = Adapter(config.hidden_size, 4, {2: Schedule.full(config.num_hidden_layers).flat(4)})
    save_adapter(tmp_path / "adapter", adapter, model, str(checkpoint))
    faster = Adapter(config.hidden_size, 4, {s: Schedule.full(config.num_hidden_layers).flat(2) for s in (2, 4)})
    save_adapter(tmp_path / "faster", faster, model, str(checkpoint))
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS[:3]])
    pruned = ["--pruned", f"smaller={checkpoint}"]
    options = "--without int8 --batch 1,2 --prompt-tokens 4 --new-tokens 6 --rounds 1 --threads 1"
    places = ["--prompts", prompts, "--output", tmp_path / "out", "--work", tmp_path / "work"]
    arguments = [checkpoint, tmp_path / "adapter", tmp_path / "faster", *options.split(), *pruned, *places]
    monkeypatch.setattr(sys, "argv", ["frontier", *map(str, arguments)])
    frontier.main()
    rows = {row["way"]: row for row in json.loads((tmp_path / "out" / "table.json").read_text())["rows"]}
    assert [*rows] == ["full depth, bfloat16", "2x, bfloat16", "4x, bfloat16", "smaller", "prompt lookup, bfloat16"]
    assert rows["full depth, bfloat16"]["ratio_2"] == 1
    assert "ratio_2" not in rows["prompt lookup, bfloat16"]
    assert not any(row["failed"] for row in rows.values())
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 1000
    full = frontier.written(model, tokenizer, [[5, 6, 7], [8, 9]], 5)
    assert [len(text) for text in full] == [5, 5]
    assert frontier.judged(model, tokenizer, [[5, 6, 7], [8, 9]], full, full)["agreement"] == 100
