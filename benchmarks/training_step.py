"""What a training step costs with the schedule on, against one with all layers: forward, backward and optimizer.

python benchmarks/training_step.py --shape opt-125m --prompt-tokens 128 --response-tokens 128
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time

import torch
from torch.nn.functional import cross_entropy

from model_shapes import random_model
from skipdecode import Schedule, teacher_forced
from skipdecode.loading.device import machine


def main() -> None:
    """Time the schedules in turn; print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="opt-125m")
    parser.add_argument("--speedup", type=float, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, _ = random_model(options.shape, "float32")
    model.train()
    layers, prompt, response = model.config.num_hidden_layers, options.prompt_tokens, options.response_tokens
    fast = Schedule.for_speedup(options.speedup, layers, response, decay="linear")
    schedules = {
        "all layers": Schedule.full(layers),
        f"{options.speedup:g}x": fast,
        f"{options.speedup:g}x, prompt_layers max": fast.replace(prompt_layers="max"),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(100, model.config.vocab_size, (options.batch, prompt + response))
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    for round_ in range(options.rounds + 1):
        for name, schedule in schedules.items():
            start = time.perf_counter()
            with teacher_forced(model, schedule, prompt):
                # As the trainer does: the head sees the response and the column before it, the loss is the response's.
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1]
                cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    report = {
        "command": f"python benchmarks/training_step.py {shlex.join(sys.argv[1:])}",
        "machine": machine("cpu"),
        "shape": f"{options.shape}, float32, {options.batch} rows of {prompt} prompt and {response} response tokens",
        "rounds": f"{options.rounds} after one to warm up, in turn, medians",
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "share_of_a_full_step": {name: round(value / medians["all layers"], 3) for name, value in medians.items()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
