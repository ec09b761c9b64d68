"""What OpenVINO would give behind a gate: one decode step of one layer, in torch, prepacked, and as an OpenVINO model.

It runs in the peers' environment with OpenVINO. With nothing else computing:

    benchmarks/peers/environments.sh openvino
    PYTHONPATH=src .peers/openvino/bin/python benchmarks/backends.py --output results/backends
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import openvino
import torch
from openvino.preprocess import PrePostProcessor
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from skipdecode.clock.model_shapes import shape_config
from skipdecode.clock.tables import save_tables
from skipdecode.core.growing import GrowingLayer
from skipdecode.errors import ModelError
from skipdecode.weights.device import machine
from skipdecode.weights.linear import plain_linear
from skipdecode.weights.prepack import PackedLinear

SHAPE, CELLS = "opt-1.3b", [(rows, context) for rows in (1, 8, 32) for context in (64, 512)]
TOLERANCE = 0.03  # how far results may be off those in float32, as a share of the greatest value
#: Hidden states (rows, 1, width), keys and values (rows, heads, context, size), which positions count (rows, 1, 1, …).
Inputs = tuple[Tensor, ...]
#: Runs the step: the layer's output, the position's key and value. The cache holds the keys and values already.
Way = Callable[[Inputs, DynamicCache], Sequence[Tensor]]


class Step(nn.Module):
    """A decoder layer, given keys and values; returns those of the new position beside its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """As a cache does: all keys and values."""
        self.new = key, value
        return torch.cat([self.past[0], key], -2), torch.cat([self.past[1], value], -2)

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """The layer's output, and the position's key and value."""
        self.past = keys, values
        return self.layer(hidden, attention_mask=mask, past_key_values=self), *self.new


def in_torch(layer: nn.Module) -> Way:
    """As a SkipCache runs it: the new position is written into room that is there."""

    def step(inputs: Inputs, cache: DynamicCache) -> Sequence[Tensor]:
        out, held = layer(inputs[0], attention_mask=inputs[3], past_key_values=cache), cache.layers[0]
        return out, held.keys[..., -1:, :], held.values[..., -1:, :]

    return step


def in_openvino(layer: nn.Module, inputs: Inputs, **options: Any) -> Way:
    """As a gate would run it: tensors share their memory with torch's; rows and context are known at each call."""
    _, heads, _, size = inputs[1].shape
    sizes = [[-1, 1, heads * size], [-1, heads, -1, size], [-1, heads, -1, size], [-1, 1, 1, -1]]
    model = openvino.convert_model(Step(layer), example_input=inputs, input=sizes)
    typed = PrePostProcessor(model)
    for part in (*map(typed.input, range(3)), *map(typed.output, range(3))):
        part.tensor().set_element_type(openvino.Type.bf16)
    options |= {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(typed.build(), "CPU", options).create_infer_request()

    def step(inputs: Inputs, cache: DynamicCache) -> Sequence[Tensor]:
        for n, x in enumerate(inputs):
            kind, bits = (openvino.Type.bf16, torch.uint16) if n < 3 else (openvino.Type.boolean, torch.bool)
            request.set_input_tensor(n, openvino.Tensor(x.view(bits).numpy(), openvino.Shape(x.shape), kind))
        request.infer()
        outputs = [request.get_output_tensor(n).data for n in range(3)]
        return [torch.from_numpy(each.view("uint16")).view(torch.bfloat16) for each in outputs]

    return step


def draw(config: Any, rows: int, context: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random states; two positions of the first of several rows are padding."""
    heads, width = config.num_attention_heads, config.hidden_size
    mask = torch.ones(rows, 1, 1, context + 1, dtype=torch.bool)
    mask[0, ..., : 2 * (rows > 1)] = False
    past = [torch.randn(rows, heads, context, width // heads, dtype=dtype) for _ in range(2)]
    return torch.randn(rows, 1, width, dtype=dtype), *past, mask


@torch.inference_mode()
def measure(ways: Mapping[str, Way], exact: Step, inputs: Inputs, rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, all in turn. Raises ModelError where results are too far off."""
    wanted = exact(*(x.float() for x in inputs[:3]), inputs[3])
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in [*ways.items()] * (rounds + 1):
        cache = DynamicCache()
        cache.layers = [GrowingLayer()]
        cache.update(*inputs[1:3], 0)
        time.sleep(0.01)  # torch's threads spin for a while, and would take OpenVINO's time
        start = time.perf_counter()
        found = way(inputs, cache)
        taken[name].append(1e3 * (time.perf_counter() - start))
        off = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
        if not off <= TOLERANCE:
            raise ModelError(f"{name} is off by {off:.1%} of the greatest value")
    median = {f"{name} ms": round(statistics.median(each[1:]), 2) for name, each in taken.items()}
    return {"batch": len(inputs[0]), "context": inputs[1].shape[2]} | median


def main() -> None:
    """Measure all cells and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    config = shape_config(SHAPE)
    config.num_hidden_layers, config.vocab_size = 1, 64
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().get_decoder().layers[0]
    exact, packed = deepcopy(plain).float(), deepcopy(plain)
    for parent, name, old in list(plain_linear(packed)):
        setattr(parent, name, PackedLinear(old.weight, old.bias))
    example = draw(config, 2, 8, torch.float32)
    ways = {"torch": in_torch(plain), "prepacked": in_torch(packed), "OpenVINO": in_openvino(exact, example)}
    ways["OpenVINO bf16"] = in_openvino(exact, example, INFERENCE_PRECISION_HINT="bf16")
    rows = [measure(ways, Step(exact), draw(config, *cell), given.rounds) for cell in CELLS]
    about = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": f"{machine('cpu')}, OpenVINO {openvino.__version__}",
        "step": f"of one layer of {SHAPE}, bfloat16; OpenVINO without a hint takes the type that it chooses",
        "caches": "torch writes the position into room; OpenVINO joins it to the past that it is given: a copy",
        "rounds": f"milliseconds, medians of {given.rounds} after one to warm up, all ways in turn",
    }
    save_tables(given.output, rows, tuple(rows[0]), [[str(value) for value in row.values()] for row in rows], about)
    print((given.output / "table.md").read_text())


if __name__ == "__main__":
    main()
