"""Tables hold what the rows do, and plots what the tables do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from skipdecode.errors import MissingExtra
from skipdecode.evaluation import report

METRICS = [("bleu", "BLEU"), ("rouge_l", "ROUGE-L")]


def row(target: float, ratio: float, **more: Any) -> dict[str, Any]:
    """A row whose clock follows its layers."""
    clock = {f"{what}_clock_ratio": 0.9 * ratio for what in ("step", "job")}
    scores = {name: 60.0 + target for name, _ in METRICS}
    scores |= {f"{name}_difference": 1 - target for name, _ in METRICS}
    intervals = {f"{name}_interval": [-target, 0.5] for name, _ in METRICS}
    return {
        "variant": {"key": "x"},
        "method": "skipdecode",
        "label": "SkipDecode" if target > 1 else "full model",
        "model": "demo",
        "target": target,
        "step_layers": 24 / ratio,
        "step_layer_ratio": ratio,
        "token_layer_ratio": ratio,
        "job_layer_ratio": ratio,
        "peak_kv_bytes": 12_345_678,
        "timed_step_layer_ratio": ratio,
        "timed_steps": 9,
        "timed_rows": 40,
        "timed_batches": 10,
        "job_seconds_per_1k_tokens": 1.234,
        "texts": ["not in the table"],
        **clock,
        **scores,
        **intervals,
        **more,
    }


ROWS = [row(1.0, 1.0), row(2.0, 2.0)]


def test_the_table_names_what_the_field_does() -> None:
    near = {"kl": 0.217, "top_1": 81.5, "text_loss": 0.9, "kl_interval": [0.2, 0.25]}
    rows = [row(1.0, 1.0, kl=0.0, top_1=100.0, text_loss=0.5), row(2.0, 2.0, **near)]
    headings, cells = report.columns(rows, [])
    assert headings == [
        "method", "speed-up", "layers", "fewer layers", "KL", "top-1 agreement", "loss under the full model",
        "decoding speed-up", "end-to-end speed-up", "s per 1k tokens", "peak KV",
    ]  # fmt: skip
    assert cells[1] == [
        "SkipDecode", "2x", "12.00", "2.00x", "0.217 (0.200 to 0.250)", "81.5%", "0.900",
        "1.80x", "1.80x", "1.23", "12.3 MB",
    ]  # fmt: skip
    headings, cells = report.columns(ROWS, METRICS)
    assert headings[4:8] == ["BLEU", "difference (95%)", "ROUGE-L", "difference (95%)"]
    assert cells[1][4:6] == ["62.00", "-1.00 (-2.00 to +0.50)"]


def test_sequences_that_exit_alone_have_a_column() -> None:
    rows = [row(1.0, 1.0), row(3.0, 2.0, token_layer_ratio=3.0)]
    headings, cells = report.columns(rows, METRICS)
    assert cells[1][headings.index("fewer layers, one sequence")] == "3.00x"
    assert "fewer layers, one sequence" not in report.columns(ROWS, METRICS)[0]


def test_a_terminal_gets_no_intervals() -> None:
    rows = [row(1.0, 1.0, kl=0.0), row(2.0, 2.0, kl=0.2, kl_interval=[0.1, 0.3])]
    headings, cells = report.brief(rows, METRICS)
    assert "(" not in "".join([*headings, *cells[1]])
    assert cells[1][headings.index("KL")] == "0.200"
    assert all(len(line) == len(headings) for line in cells)


def test_notes_say_what_cannot_be_trusted() -> None:
    assert set(report.notes(ROWS)) == {"clock", "ratios"}
    lucky = row(2.0, 2.0, step_clock_ratio=2.1)
    assert set(report.notes([ROWS[0], lucky])) == {"clock", "ratios", "*"}
    assert set(report.notes([row(1.0, 1.0, timed_rows=3)])) == {"clock", "ratios", "rough"}


def test_files_hold_all_rows_without_their_texts(tmp_path: Path) -> None:
    report.save(ROWS, METRICS, {"machine": "here"}, tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "table.json").read_text())
    assert saved["about"] == {"machine": "here"}
    assert saved["rows"] == [{k: v for k, v in each.items() if k not in ("texts", "variant")} for each in ROWS]
    table = (tmp_path / "new" / "table.md").read_text()
    assert table.count("\n| ") == len(ROWS) + 1
    assert table.endswith("machine: here\n")
    assert len({len(line) for line in table.splitlines()[:4]}) == 1


def test_a_plot_shows_each_metric_by_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.plot_tradeoff(ROWS, METRICS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    report.plot_lines(tmp_path / "one.svg", "x", [("y", {"a": [(1, 2), (2, 3)]})], title="a title of one's own")
    assert "a title of one's own" in (tmp_path / "one.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"skipdecode\[cli\]"):
        report.plot_tradeoff(ROWS, METRICS, tmp_path / "plot.png")
