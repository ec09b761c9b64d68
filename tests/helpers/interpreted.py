"""vLLM's model runner V2 on a CPU: its Triton kernels run in Triton's own interpreter.

vLLM asks Triton for a CPU backend, which PyPI's Triton has not. With ``TRITON_INTERPRET=1`` none is needed: kernels
run line by line, in Python, on tensors in the host's memory. Slow, and the same code that GPUs compile.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

#: Whether there is a GPU, whose Triton compiles.
GPU = Path("/dev/nvidia0").exists()
#: Whether vLLM is told to take model runner V2, as make test-vllm-v2 does.
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def allow() -> None:
    """Let vLLM find a CPU backend. RuntimeError: kernels would not be interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("model runner V2 on a CPU needs TRITON_INTERPRET=1, as make test-vllm-v2 sets it")
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: False)  # of no device that Triton would compile for
    backends.setdefault("cpu", SimpleNamespace(compiler=None, driver=driver))  # all that vLLM looks at
