"""Tables hold what the rows do, and plots what the tables do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skipdecode.evaluation import report


def row(target: float, ratio: float, *metrics: str, **more: Any) -> dict[str, Any]:
    """A row whose clock follows its layers."""
    scores: dict[str, Any] = {}
    for name in metrics:
        scores |= {name: 60.0 + target, f"{name}_difference": 1 - target, f"{name}_interval": [-target, 0.5]}
    return {
        "variant": {"key": "x"},
        "method": "skipdecode",
        "label": "SkipDecode" if target > 1 else "full model",
        "target": target,
        "step_layers": 24 / ratio,
        "step_layer_ratio": ratio,
        "token_layer_ratio": ratio,
        "peak_kv_bytes": 12_345_678,
        "timed_step_layer_ratio": ratio,
        "timed_steps": 9,
        "timed_rows": 40,
        "timed_batches": 10,
        "job_seconds_per_1k_tokens": 1.234,
        "step_clock_ratio": 0.9 * ratio,
        "job_clock_ratio": 0.9 * ratio,
        "texts": ["not in the table"],
        **scores,
        **more,
    }


ROWS = [row(1.0, 1.0, "bleu", "rouge_l"), row(2.0, 2.0, "bleu", "rouge_l")]
NEAR = {"kl": 0.217, "top_1": 81.5, "text_loss": 0.9, "kl_interval": [0.2, 0.25]}


def test_the_table_names_what_the_field_does() -> None:
    """Without references; sequences that exit alone have a column, and what is not known none of its text."""
    rows = [row(1.0, 1.0, kl=0.0, top_1=100.0, text_loss=0.5), row(2.0, 2.0, **NEAR)]
    headings, cells = report.columns(rows)
    assert headings == [
        "method", "speed-up", "layers", "fewer layers", "KL", "same next token", "loss under the full model",
        "decoding speed-up", "end-to-end speed-up", "s per 1k tokens", "peak KV",
    ]  # fmt: skip
    assert cells[1] == [
        "SkipDecode", "2x", "12.00", "2.00x", "0.217 (0.200 to 0.250)", "81.5%", "0.900",
        "1.80x", "1.80x", "1.23", "12.3 MB",
    ]  # fmt: skip
    headings, cells = report.columns([*rows, row(3.0, 2.0, token_layer_ratio=3.0)])
    found = dict(zip(headings, cells[2], strict=True))
    assert (found["fewer layers, one sequence"], found["KL"]) == ("3.00x", "")
    headings, cells = report.columns([row(1.0, 1.0, peak_memory_bytes=2_000_000)])
    assert (headings[-1], cells[0][-1]) == ("peak memory beside the weights", "2.0 MB")


def test_scores_stand_beside_their_differences_and_a_terminal_gets_no_intervals() -> None:
    headings, cells = report.columns(ROWS)
    assert headings[4:6] == ["BLEU", "BLEU, difference (95%)"]
    assert cells[1][4:6] == ["62.00", "-1.00 (-2.00 to +0.50)"]
    headings, cells = report.columns([ROWS[0] | {"kl": 0.0}, ROWS[1] | NEAR], brief=True)
    assert headings == ["method", "speed-up", "fewer layers", "BLEU", "ROUGE-L", "KL", *headings[6:]]
    assert cells[1][3:6] == ["62.00", "62.00", "0.217"]
    assert "(" not in "".join([*headings, *cells[1]])


def test_notes_say_what_cannot_be_trusted() -> None:
    """Few timings, and more than skipped layers explain."""
    lucky = row(2.0, 2.0, step_clock_ratio=2.006)
    assert report.columns([lucky], brief=True)[1][0][3] == "2.01x*"
    for ratio in (2.0, 2.004):
        assert set(report.notes([ROWS[0], row(2.0, 2.0, step_clock_ratio=ratio)])) == {"clock", "ratios"}
    assert set(report.notes([ROWS[0], lucky])) == {"clock", "ratios", "*"}
    for few in ({"timed_rows": 31}, {"timed_batches": 4}):
        assert set(report.notes([row(1.0, 1.0, **few)])) == {"clock", "ratios", "rough"}


def test_files_hold_all_rows_without_their_texts(tmp_path: Path) -> None:
    report.save(ROWS, {"machine": "here"}, tmp_path)
    saved = json.loads((tmp_path / "table.json").read_text())
    assert saved["about"] == {"machine": "here"}
    assert saved["rows"] == [{k: v for k, v in each.items() if k not in ("texts", "variant")} for each in ROWS]
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n| ") == len(ROWS) + 1
    assert table.endswith("machine: here\n")
    assert len({len(line) for line in table.splitlines()[:4]}) == 1
