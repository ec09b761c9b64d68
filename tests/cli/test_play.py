"""``skipdecode play``: which speeds are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny import run
from skipdecode.cli.play import default_speedups


def test_slow_speeds_come_first() -> None:
    assert default_speedups(()) == (1.0, 1.5, 2.0)
    assert default_speedups((1.0, 5.0, 2.0, 3.0)) == (1.0, 2.0, 3.0)
    assert default_speedups((1.5,)) == (1.0, 1.5)


@pytest.mark.parametrize("speedups", ["1,2,3,4", "x"])
def test_too_many_speeds_are_refused(checkpoint: Path, speedups: str) -> None:
    assert run("play", checkpoint, "--speedups", speedups).returncode == 2
