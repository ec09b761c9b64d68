"""One vLLM engine in a process of its own, stepped by hand: lines of JSON in, lines of JSON out.

First line in: ``{"model", "options"}``; then ``{"requests": [[prompt tokens, new tokens, speed-up], …]}``, all waiting
at the start. Each is answered by ``{"seconds", "steps": [[seconds, seconds of the forward pass, tokens, requests that
got a token], …], "requests": [[seconds to the first token, seconds to the last], …], "layers"}``. Only on a CPU is a
forward pass done when it returns: elsewhere its seconds are null.
"""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
import random
import sys
import time
import traceback
from typing import Any

import torch
import transformers
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine


class Engine:
    """A loaded engine whose steps are timed."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **options))
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.plugin = hasattr(self.runner, "skip_context")
        self.count = 0
        self.forward: float | None = None
        self.tokens = 0
        execute = self.runner.execute_model
        forward: Any = getattr(self.runner, "_model_forward", None)

        def executed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.tokens = scheduled.total_num_scheduled_tokens
            return execute(scheduled, *args, **kwargs)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = forward(*args, **kwargs)
            self.forward = time.perf_counter() - start
            return output

        self.runner.execute_model = executed
        if self.runner.device.type == "cpu" and forward is not None:
            self.runner._model_forward = timed

    def run(self, requests: list[list[float]]) -> dict[str, Any]:
        """Serve the requests to their end."""
        source = random.Random(0)
        first = self.count + 1
        for prompt, new, speedup in requests:
            self.count += 1
            ids = [source.randrange(10, 1000) for _ in range(int(prompt))]
            extra = {"speedup": speedup} if self.plugin else None
            params = SamplingParams(
                temperature=0, max_tokens=int(new), ignore_eos=True, detokenize=False, extra_args=extra
            )
            self.engine.add_request(str(self.count), TokensPrompt(prompt_token_ids=ids), params)
        steps, written = [], 0
        times: list[list[float]] = [[] for _ in requests]
        before = self._layers()
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            at = time.perf_counter()
            outputs = self.engine.step()
            now = time.perf_counter()
            steps.append([now - at, self.forward, self.tokens, len(outputs)])
            for output in outputs:
                place = int(output.request_id) - first
                times[place] = [*times[place][:1], now - start]
                written += len(output.outputs[0].token_ids) if output.finished else 0
        seconds = time.perf_counter() - start
        wanted = sum(int(new) for _, new, _ in requests)
        if written != wanted:
            raise ValueError(f"{wanted} new tokens were asked for, {written} were written")
        layers = {name: after - before[name] for name, after in self._layers().items()}
        return {"seconds": seconds, "tokens": written, "steps": steps, "requests": times, "layers": layers}

    def _layers(self) -> dict[str, int]:
        plan = self.runner.skip_context if self.plugin else None
        return {"full": plan.full_tokens, "needed": plan.needed_tokens, "run": plan.run_tokens} if plan else {}


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    job = json.loads(sys.stdin.readline())
    engine = Engine(job["model"], job["options"])
    versions = f"vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"plugin": engine.plugin, "versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(json.loads(line)["requests"])), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # workers of compilers would keep the process, and who waits for its answer, for ever
