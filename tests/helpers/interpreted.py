"""vLLM's model runner V2 on a CPU: its Triton kernels run in Triton's own interpreter.

vLLM asks Triton for a CPU backend, which PyPI's Triton has not. With ``TRITON_INTERPRET=1`` none is needed: kernels
run line by line, in Python, on tensors in the host's memory. Slow, and the same code that GPUs compile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Whether there is a GPU, whose Triton compiles.
GPU = Path("/dev/nvidia0").exists()
#: Whether vLLM is told to take model runner V2, as make test-vllm-v2 does.
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


class Driver:
    """Of no device that Triton would compile for."""

    @staticmethod
    def is_active() -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Backend:
    """All that vLLM looks at."""

    compiler: Any = None
    driver: Any = Driver


def allow() -> None:
    """Let vLLM find a CPU backend. Raises RuntimeError where kernels would not be interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("model runner V2 on a CPU needs TRITON_INTERPRET=1, as make test-vllm-v2 sets it")
    from triton.backends import backends

    backends.setdefault("cpu", Backend())
