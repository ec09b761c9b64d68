"""What an engine's process is asked and what it answers: lines of JSON. Standard library only: every engine imports it.

First line in: the job (checkpoint, precision, threads, the most rows, prompt and new tokens, options of the engine).
First line out: ``{"versions": …}``, once the model is loaded. Then, for every line ``{"prompts", "new_tokens",
"options"}``, a line ``{"seconds", "tokens"}``. Whatever fails is a line ``{"error": …}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Job = dict[str, Any]
#: (prompts as token ids, new tokens per row, options of the call) -> the new tokens of each row.
Generate = Callable[..., list[list[int]]]


def serve(load: Callable[[Job], Generate], *packages: str) -> None:
    """Answer until the input ends. ``load`` makes the function that is timed; the versions of ``packages`` are told."""
    # A process that is asleep would outlive the one that asks it, were that killed (1 is PR_SET_PDEATHSIG).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # Libraries print what they like to standard output: it becomes standard error, and the answers keep the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        generate = load(json.loads(sys.stdin.readline()))
        answer({"versions": {"python": platform.python_version()} | {name: version(name) for name in packages}})
        for line in sys.stdin:
            request = json.loads(line)
            prompts, new_tokens = request["prompts"], request["new_tokens"]
            start = time.perf_counter()
            rows = generate(prompts, new_tokens, **request["options"])
            seconds = time.perf_counter() - start
            if [len(row) for row in rows] != [new_tokens] * len(prompts):
                raise ValueError(f"{new_tokens} new tokens were asked for, the rows have {[len(row) for row in rows]}")
            answer({"seconds": seconds, "tokens": rows})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
