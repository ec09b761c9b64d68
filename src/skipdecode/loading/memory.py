"""Old names, until no room calls them."""

from __future__ import annotations

from .offload import _free_memory as available_memory

__all__ = ["available_memory"]
