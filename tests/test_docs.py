"""What the documents say of the tests is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_reliability_names_is_there() -> None:
    """docs/reliability.md names tests as ``file::name``; each exists, and each fault of the lists has one."""
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)::(\w+)`", text))
    assert len(named) > 80
    for file, name in named:
        source = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", source, re.MULTILINE), f"{file}::{name}"
    faults = {*(f"F{n}" for n in range(1, 17)), *(f"B{n}" for n in range(1, 20))}
    rows = {line.split()[1] for line in text.splitlines() if re.match(r"\| [FB]\d+ ", line)}
    assert rows == faults
