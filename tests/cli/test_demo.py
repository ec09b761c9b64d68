"""``skipdecode demo``."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from helpers.tiny import run
from skipdecode.cli import demo


@pytest.mark.slow
def test_the_demo_shows_outputs_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """1x is always there; layers fall with the speed, and so does the KV cache."""
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 12)
    done = run("demo", "--speedups", "2,5", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["speed"] for row in rows] == [1, 2, 5]
    assert rows[0]["layers"] == 24
    assert rows[0]["decoding speed-up"] == 1
    for before, after in pairwise(rows):
        assert after["layers"] < before["layers"]
        assert after["peak KV, MB"] < before["peak KV, MB"]
    assert done.stdout.count("  5x  ") == demo.SHOWN
