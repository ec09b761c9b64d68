"""Options that several verbs share."""

from __future__ import annotations

import pytest

from skipdecode.cli.options import parse_numbers, parse_speedups
from skipdecode.errors import UsageError


def test_speeds_are_numbers_with_commas_between() -> None:
    assert parse_speedups(None) is None
    assert parse_speedups("1,1.5,2") == (1.0, 1.5, 2.0)


@pytest.mark.parametrize("text", ["", "x", "0.5", "2,2", "1,,2", "nan"])
def test_other_speeds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--speedups"):
        parse_speedups(text)


@pytest.mark.parametrize("text", ["", "x", "0", "1.5"])
def test_other_numbers_are_refused(text: str) -> None:
    assert parse_numbers("1,8", "--batch-size") == (1, 8)
    with pytest.raises(UsageError, match="--batch-size"):
        parse_numbers(text, "--batch-size")
