"""Checks that the installed vLLM is a release that the plugin was tested with."""

from __future__ import annotations

import os

from ..errors import UnsupportedModel

#: All tests ran with these releases.
TESTED = ("0.32.0",)
#: This environment variable, set to 1, allows other releases and GPUs.
ALLOW = "SKIPDECODE_ALLOW_UNTESTED_VLLM"


def is_tested(version: str) -> bool:
    """Return whether this release of vLLM was tested, or the environment allows any."""
    return version.split("+")[0] in TESTED or bool(os.environ.get(ALLOW))


def require_tested(version: str) -> None:
    """Raise UnsupportedModel for a release of vLLM that was not tested, unless the environment allows it."""
    if not is_tested(version):
        raise UnsupportedModel(
            f"skipdecode was tested with vLLM {', '.join(TESTED)}, not with {version}: install that one, or set "
            f"{ALLOW}=1 and compare the texts yourself"
        )
