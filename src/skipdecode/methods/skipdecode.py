"""SkipDecode (Del Corro et al., 2023): depth falls with the position, lower and middle layers go first."""

from __future__ import annotations

from .base import Method


class SkipDecode(Method):
    """Linear decay, order ``top``, depths and horizon fitted to the lengths that are really written."""

    name = "skipdecode"
    label = "SkipDecode"
    order = "top"
    takes_style = True
