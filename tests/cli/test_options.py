"""Options that several verbs share."""

from __future__ import annotations

import pytest

from skipdecode.cli.options import parse_speedups
from skipdecode.errors import UsageError


def test_speeds_are_numbers_with_commas_between() -> None:
    assert parse_speedups(None) is None
    assert parse_speedups("1,1.5,2") == (1.0, 1.5, 2.0)
    for text in ("", "x", "0.5", "2,2", "1,,2", "nan"):
        with pytest.raises(UsageError, match="--speedups"):
            parse_speedups(text)
