"""What users see or other releases read: help texts, a schedule, a table, the config entry (``golden`` of conftest)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from rich.console import Console

from helpers.tiny import run
from skipdecode.cli import console
from skipdecode.cli.main import app
from skipdecode.evaluation.report import brief, columns, markdown_table
from skipdecode.loading.load import DEMO
from skipdecode.model.config import CONFIG_KEY, config_schedules, to_config_entry, trained_method

Golden = Callable[[str, str], None]
COMMAND: Any = typer.main.get_command(app)


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(console.out, "width", 100)  # it was made when it was imported


@pytest.mark.skipif(not hasattr(typer, "_click"), reason="an older typer prints another layout")
@pytest.mark.parametrize("verb", sorted(COMMAND.commands))
def test_help(verb: str, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    """Options, their ranges, their defaults and what is said of them."""
    COMMAND.main([verb, "--help"], prog_name="skipdecode", standalone_mode=False)
    golden(f"help-{verb}.txt", capsys.readouterr().out)


def test_a_schedule(golden: Golden) -> None:
    """The staircase in the terminal."""
    golden("schedule.txt", run("schedule", "--speedup", 3, "--layers", 24).stdout)


CLOCK = {"job_clock_ratio": 1.0, "step_clock_ratio": 1.01, "job_seconds_per_1k_tokens": 1.5}
CLOCK |= {"timed_step_layer_ratio": 1.0, "timed_job_layer_ratio": 1.0}
FULL: dict[str, Any] = {"label": "full model", "target": 1.0, "step_layers": 24.0, "step_layer_ratio": 1.0}
FULL |= {"token_layer_ratio": 1.0, "job_layer_ratio": 1.0}
FULL |= {"bleu": 67.41, "bleu_difference": 0.0, "bleu_interval": [0.0, 0.0]}
FULL |= CLOCK | {"loss": 1.9786, "peak_kv_bytes": 62_128_128}


def test_a_table(golden: Golden) -> None:
    """The columns of ``table.md``, and how their numbers are written."""
    half = {"label": "SkipDecode", "target": 2.0, "step_layers": 11.921}
    half |= {"step_layer_ratio": 2.013, "token_layer_ratio": 2.013, "job_layer_ratio": 1.4}
    half |= {"bleu": 67.19, "bleu_difference": -0.22, "bleu_interval": [-0.5, 0.05]}
    half |= {"job_clock_ratio": 1.533, "step_clock_ratio": 2.1, "job_seconds_per_1k_tokens": 0.9936}
    half |= {"timed_step_layer_ratio": 2.0, "timed_job_layer_ratio": 1.45, "peak_kv_bytes": 2.1e7}
    golden("table.md", markdown_table(*columns([FULL, half], [("bleu", "BLEU")])) + "\n")


def test_the_config_entry(golden: Golden) -> None:
    """What training writes into a checkpoint's config, which releases before and after this one read."""

    class Config:
        skipdecode = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))[CONFIG_KEY]

    written = to_config_entry(config_schedules(Config), trained_method(Config))
    golden("config-entry.json", json.dumps(written, indent=1, sort_keys=True) + "\n")
    assert written == Config.skipdecode


def test_a_narrow_terminal_cuts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Names wrap; scores, their differences and intervals stay whole in 80 columns."""
    row = FULL | {"label": "Unified Layer Skipping, untrained", "target": 2.5, "step_layer_ratio": 2.48}
    row |= {"step_clock_ratio": 2.41, "job_clock_ratio": 1.93, "timed_step_layer_ratio": 2.5, "peak_kv_bytes": 62.1e6}
    for name in ("bleu", "rouge_l"):
        row |= {name: 67.41, f"{name}_difference": -10.22, f"{name}_interval": [-12.5, 10.05]}
    heads, cells = brief([FULL | row, row], [("bleu", "BLEU"), ("rouge_l", "ROUGE-L")])
    monkeypatch.setattr(console, "out", Console(width=80))
    console.print_table(heads, cells)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    for text in ("2.5x", "67.41", "-10.22", "-12.50 to +10.05", "2.41x", "1.93x", "62.1 MB", "untrained"):
        assert text in printed


def test_without_references_distances_stand_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of the differences, which say nothing that the scores do not."""
    row = FULL | {"kl": 9.245, "kl_interval": [8.1, 10.2], "top_1": 100.0, "text_loss": 12.25, "peak_kv_bytes": 198.4e6}
    for name in ("agreement", "repetition"):
        row |= {name: 100.0, f"{name}_difference": -100.0, f"{name}_interval": [-100.0, -50.0]}
    monkeypatch.setattr(console, "out", Console(width=80))
    console.print_table(*brief([row, row], [("agreement", "agreement"), ("repetition", "repetition")]))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "198.4 MB" in printed
    assert "9.245" in printed
    assert "…" not in printed
    assert "-50.00" not in printed


def test_cells_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets of a path are no markup; no column of a narrow terminal is pushed out by a row that stands out."""
    cells = [["1.5x[a]", *["126.46"] * 7], ["2x", *["1,234.5"] * 7]]
    monkeypatch.setattr(console, "out", Console(width=72))
    console.print_table(["speed-up", *"abcdefg"], cells, bold=[0])
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split() == ["1.5x[a]", *["126.46"] * 7]
    assert second.split() == ["2x", *["1,234.5"] * 7]
    monkeypatch.setattr(console, "out", Console(width=72, force_terminal=True, color_system="standard"))
    console.print_table(["speed-up", *"abcdefg"], cells, bold=[0])
    assert ["\x1b[1m" in line for line in capsys.readouterr().out.splitlines()[-2:]] == [True, False]
