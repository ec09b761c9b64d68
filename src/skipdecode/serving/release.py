"""Which releases of vLLM the plugin was tested with."""

from __future__ import annotations

import os

from ..errors import UnsupportedModel

#: The releases that all tests ran with.
TESTED = ("0.32.0",)
#: Set to 1, this environment variable allows other releases, and GPUs.
ALLOW = "SKIPDECODE_ALLOW_UNTESTED_VLLM"


def is_tested(version: str) -> bool:
    """Whether a release of vLLM was tested, or the environment allows it."""
    return version.split("+")[0] in TESTED or bool(os.environ.get(ALLOW))


def require_tested(version: str) -> None:
    """Raises UnsupportedModel for a release of vLLM that was not tested, unless the environment allows it."""
    if not is_tested(version):
        raise UnsupportedModel(
            f"skipdecode was tested with vLLM {', '.join(TESTED)}, not with {version}: install that one, or set "
            f"{ALLOW}=1 and compare the texts yourself"
        )
