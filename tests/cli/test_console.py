"""Tables and progress."""

from __future__ import annotations

import pytest

from skipdecode.cli import console


def test_progress_is_drawn_rarely_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done, the rate, and the time left; nothing before there is progress."""
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    with console.Bar() as bar:
        bar._time = lambda: next(clock)
        assert capsys.readouterr().err == ""
        bar.show("generate", 0, 400)
        for _ in range(40):
            bar.advance(2, "5 tokens/s")
        drawn = capsys.readouterr().err.split("\r")
    assert 5 < len(drawn) < 25
    assert "generate: " in drawn[-1]
    assert "/400" in drawn[-1]
    assert "5 tokens/s" in drawn[-1]


def test_numbers_of_a_table_are_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 40)
    console.print_table(["a long first column", "figure"], [["x" * 60, "1234567.89"]])
    assert "1234567.89" in capsys.readouterr().out
