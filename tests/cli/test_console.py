"""Tables and progress."""

from __future__ import annotations

import pytest

from skipdecode.cli import console


def test_progress_is_printed_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line each interval, with what is done and the time left; none before any work."""
    now = iter(range(0, 100_000, 60))
    printed: list[str] = []
    monkeypatch.setattr("skipdecode.cli.console.time.monotonic", lambda: next(now))
    monkeypatch.setattr(console, "say", printed.append)
    with console.Bar() as bar:
        assert printed == []
        bar.show("generate", 0, 4)
        bar.advance(2, "5 tokens/s")
    assert printed[-1].startswith("generate: 2 of 4 5 tokens/s, about ")


def test_numbers_of_a_table_are_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 40)
    console.print_table(["a long first column", "figure"], [["x" * 60, "1234567.89"]])
    assert "1234567.89" in capsys.readouterr().out
