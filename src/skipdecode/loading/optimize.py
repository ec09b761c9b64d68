"""Old names, until no room calls them."""

from __future__ import annotations

from typing import Any

from .int8 import linear_class


def optimizations(quantization: str | None = None, prepack: bool = False) -> dict[str, Any]:
    """Those of the two options that are on; pass both to :func:`skipdecode.load`, which checks them."""
    linear_class(quantization, prepack, "cpu")
    given = {"quantization": quantization, "prepack": prepack}
    return {name: value for name, value in given.items() if value}
