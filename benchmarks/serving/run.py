"""Stock vLLM and vLLM with the plugin in turn, on the same machine in the same run: throughput and time per step.

    python benchmarks/serving --shape opt-1.3b --slots 32 --output results/serving

Lockstep: as many requests as slots, all of one length, start together; the median step of those without a prompt
counts. Continuous: three requests per slot, all waiting, of random lengths, so that prompts come in while others write.
Every budget runs in one engine: a request's schedule is its own. Rounds alternate; medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from skipdecode import Schedule
from skipdecode.clock.shapes import shape_config
from skipdecode.clock.tables import markdown_table
from skipdecode.files import write
from skipdecode.generation.machine import machine

FOLDER = Path(__file__).resolve().parent
#: Forms of a schedule beside its speed-up: (name, what is added to its key, fields).
FORMS: dict[str, tuple[float, dict[str, Any]]] = {
    "flat": (0.0, {"decay": "constant"}),
    "falling": (0.01, {}),
    "flat, prompt too": (0.02, {"decay": "constant", "prompt_layers": "max"}),
}


def schedules(num_layers: int, speedups: Sequence[float], horizon: int) -> dict[float, Schedule]:
    """All forms of all speed-ups, each under a key of its own."""
    made = {1.0: Schedule.full(num_layers)}
    for speedup in speedups:
        for shift, fields in FORMS.values():
            made[round(speedup + shift, 2)] = Schedule.for_speedup(speedup, num_layers, horizon, **fields)
    return made


class Running:
    """An engine's process; asleep unless it is asked."""

    def __init__(self, python: str, job: dict[str, Any], plugins: str, log: Path) -> None:
        cores = sorted(os.sched_getaffinity(0))
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_PLUGINS": plugins,
            "OMP_NUM_THREADS": str(len(cores)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, str(FOLDER / "engine.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        found = self._ask(job)["plugin"]
        if found != bool(plugins):
            raise RuntimeError(f"the plugin is {'there' if found else 'not there'}: see {log}")
        os.killpg(self._process.pid, signal.SIGSTOP)

    def ask(self, requests: list[list[float]]) -> dict[str, Any]:
        """Serve the requests."""
        os.killpg(self._process.pid, signal.SIGCONT)
        answer = self._ask({"requests": requests})
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer

    def _ask(self, values: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(values), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended with code {self._process.wait()}: see {self._log.name}")
        return json.loads(line)

    def close(self) -> None:
        """End it and all that it started."""
        os.killpg(self._process.pid, signal.SIGCONT)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()


@contextmanager
def engines(given: argparse.Namespace, made: dict[float, Schedule], longest: int) -> Iterator[dict[str, Running]]:
    """Stock and plugin, both loaded."""
    config = shape_config(given.shape)
    config.dtype = "bfloat16"
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    given.work.mkdir(parents=True, exist_ok=True)
    if given.model is None:  # speed does not depend on the weights' values
        config.save_pretrained(given.work)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "auto" if given.model else "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "max_num_seqs": given.slots,
        "max_num_batched_tokens": max(2048, longest),
        "kv_cache_memory_bytes": given.kv_gib << 30,
        "enable_prefix_caching": False,  # the same prompts come in every round
        "enforce_eager": given.eager,
        "disable_log_stats": True,
    }
    entry = {"schedules": {f"{key:g}": schedule.to_dict() for key, schedule in made.items()}}
    jobs = {"stock": (options, ""), "plugin": (options | {"hf_overrides": {"skipdecode": entry}}, "skipdecode")}
    with ExitStack() as stack:
        running = {}
        for name, (its, plugins) in jobs.items():
            print(f"loading {name}", flush=True)
            model = str(given.model or given.work)
            one = Running(given.python, {"model": model, "options": its}, plugins, given.work / f"{name}.log")
            stack.callback(one.close)
            running[name] = one
        yield running


def workloads(given: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Prompt and new tokens of each request."""
    source = random.Random(0)
    lengths = [source.randint(given.new_tokens // 2, given.new_tokens * 3 // 2) for _ in range(3 * given.slots)]
    return {
        "lockstep": [[given.prompt_tokens, given.new_tokens]] * given.slots,
        "continuous": [[given.prompt_tokens, new] for new in lengths],
    }


def summary(answers: list[dict[str, Any]], slots: int) -> dict[str, float]:
    """Medians over rounds; of steps in which every slot writes and none reads a prompt."""
    plain = [[step for step in a["steps"] if step[2] == step[3] == slots] for a in answers]
    values = {
        "tokens_per_second": statistics.median(a["tokens"] / a["seconds"] for a in answers),
        "prompt_share": statistics.median(
            sum(s[0] for s in a["steps"] if s[2] > slots) / a["seconds"] for a in answers
        ),
    }
    if all(plain):
        values["step_ms"] = 1e3 * statistics.median(statistics.median(s[0] for s in steps) for steps in plain)
        values["forward_ms"] = 1e3 * statistics.median(statistics.median(s[1] for s in steps) for steps in plain)
    layers = answers[-1]["layers"]
    if layers:
        values["layers_run"] = layers["run"] / layers["full"]
    return values


def measure(given: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, after each round."""
    num_layers = shape_config(given.shape).num_hidden_layers
    made = schedules(num_layers, given.speedups, given.new_tokens)
    names = {("stock", "", 1.0): ("stock", 1.0), ("plugin", "", 1.0): ("plugin", 1.0)}
    for speedup in given.speedups:
        for form, (shift, _) in FORMS.items():
            names["plugin", form, speedup] = ("plugin", round(speedup + shift, 2))
    done: list[dict[str, Any]] = []
    longest = given.prompt_tokens + given.new_tokens * 3 // 2 + 8
    with engines(given, made, longest) as running:
        warm = [[given.prompt_tokens, 4]] * given.slots
        for engine, key in names.values():
            running[engine].ask([[*lengths, key] for lengths in warm])
        for load, requests in workloads(given).items():
            answers: dict[Any, list[dict[str, Any]]] = {name: [] for name in names}
            for number in range(given.rounds):
                for name, (engine, key) in names.items():
                    answers[name].append(running[engine].ask([[*lengths, key] for lengths in requests]))
                    print(f"{load}, round {number + 1}: {name} {answers[name][-1]['seconds']:.1f} s", flush=True)
                rows = []
                for (engine, form, speedup), found in answers.items():
                    ratio = num_layers / made[names[engine, form, speedup][1]].average_depth(given.new_tokens)
                    row = {"load": load, "rounds": number + 1, "engine": engine, "form": form, "speedup": speedup}
                    rows.append(row | {"layer_ratio": ratio} | summary(found, given.slots))
                yield [*done, *rows]
            done += rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: each figure beside its ratio to stock vLLM in the same run."""
    text = []
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = [row for row in rows if row["load"] == load]
        stock = next(row for row in mine if row["engine"] == "stock")
        lines = []
        for row in mine:
            line = {
                "engine": row["engine"],
                "schedule": f"{row['speedup']:g}x {row['form']}".strip(),
                "layers": f"{row['layer_ratio']:.2f}x",
                "tokens/s": f"{row['tokens_per_second']:.0f}",
                "of stock": f"{row['tokens_per_second'] / stock['tokens_per_second']:.2f}x",
                "prompts' share": f"{row['prompt_share']:.0%}",
            }
            for name, field in (("step", "step_ms"), ("forward pass", "forward_ms")):
                if field in row and field in stock:
                    line[f"{name}, ms"] = f"{row[field]:.1f}"
                    line[f"{name}, of stock"] = f"{stock[field] / row[field]:.2f}x"
            lines.append(line)
        heads = list(lines[0])
        cells = [[line.get(head, "") for head in heads] for line in lines]
        text.append(f"## {load.capitalize()}\n\n{markdown_table(heads, cells, words=2)}\n")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write table.md and table.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-1.3b")
    parser.add_argument("--model", type=Path, help="a checkpoint of this shape, int8 weights say (default: random)")
    parser.add_argument("--speedups", default="2,3,5", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="of the environment that has vLLM")
    parser.add_argument("--work", type=Path, default=Path("runs/serving"))
    parser.add_argument("--output", type=Path, default=Path("results/serving"))
    given = parser.parse_args(arguments)
    about = {"machine": machine(), "command": "python benchmarks/serving " + " ".join(sys.argv[1:])}
    given.output.mkdir(parents=True, exist_ok=True)
    text = ""
    for rows in measure(given):  # what a killed run has measured stays
        write(given.output / "table.json", json.dumps(about | {"rows": rows}, indent=1) + "\n")
        text = table(rows)
        write(given.output / "table.md", text)
    print(text)
    return 0
