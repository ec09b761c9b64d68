"""SmolLM2 in torch alone: packed weights, full passes, layers as functions, decoding from CUDA graphs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

HEAD = 64  # size of a head
STOP = 2  # the token that ends an answer
WINDOW = 64  # positions by which the windows of decode steps differ
Layer = namedtuple("Layer", "norm1 qkv o norm2 gate_up down")  # qkv and gate_up are several of the model's matrices
Tables = tuple[Tensor, Tensor]  # cosines and sines of the rotary positions


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Hidden states over their root mean square, times a weight."""
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Queries or keys with rotary positions."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * tables[0] - b * tables[1], b * tables[0] + a * tables[1]], -1)


def heads(x: Tensor, norm1: Tensor, weight: Tensor) -> Tensor:
    """Normed hidden states times a weight, (rows, heads, positions, head size)."""
    return F.linear(norm(x, norm1), weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)


def project(x: Tensor, norm1: Tensor, qkv: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer's input."""
    parts, queries = heads(x, norm1, qkv), x.shape[-1] // HEAD
    k, v = parts[:, queries:].chunk(2, 1)
    return rotate(parts[:, :queries], tables), rotate(k, tables), v


def finish(x: Tensor, attended: Tensor, o: Tensor, norm2: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Output of a layer, from its input and its heads' outputs."""
    x = x + F.linear(attended.transpose(1, 2).flatten(2), o)
    gate, up = F.linear(norm(x, norm2), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def block(x: Tensor, layer: Layer, tables: Tables) -> Tensor:
    """Output of a layer."""
    q, k, v = project(x, layer.norm1, layer.qkv, tables)
    return finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), *layer[2:])


def private_block(x: Tensor, full: Tensor, answer: Tensor, layer: Layer, own: list[Tensor], tables: Tables) -> Tensor:
    """Output of a layer with its ``own`` weights; prompts have the keys and values of ``full``, the model's input."""
    q, k, v = project(x, layer.norm1, own[0], tables)
    with torch.no_grad():
        full_k, full_v = heads(full, layer.norm1, layer.qkv[x.shape[-1] :]).chunk(2, 1)
        full_k = rotate(full_k, tables)
    k, v = torch.where(answer[:, None], k, full_k), torch.where(answer[:, None], v, full_v)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return finish(x, attended, own[1], layer.norm2, own[2], own[3])


def bypass(x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    """Low-rank affine map in the place of a skipped span."""
    return x + bias + (x @ down) @ up


def bottleneck(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Nonlinear correction of a layer's input."""
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).clamp_min(1e-6)
    return x + F.silu((x @ down) * (x.shape[-1] ** 0.5 / length).to(x.dtype)) @ up


class Model:
    """The full model: weights by their names in GGUF, and the functions of its layers, compiled or not."""

    def __init__(self, weights: dict[str, Tensor], dtype: torch.dtype, compiled: bool = False) -> None:
        numbers = range(sum(name.endswith("attn_q.weight") for name in weights))
        self.exact = [layer_of(weights, number) for number in numbers]  # in float32: a LoRA is added to these
        self.layers = [Layer(*(weight.to(dtype) for weight in layer)) for layer in self.exact]
        self.embedding = weights["token_embd.weight"].to(dtype)
        self.norm = weights["output_norm.weight"].to(dtype)
        self.device, self.dtype, self.compiled = self.embedding.device, dtype, compiled
        angles = torch.outer(torch.arange(1024), 1e5 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.cos, self.sin = angles.cos().to(self.embedding), angles.sin().to(self.embedding)
        self.block, self.private_block, self.bypass, self.bottleneck, self.project, self.finish = (
            self.compile(each) for each in (block, private_block, bypass, bottleneck, project, finish)
        )

    def compile(self, function: Any, dynamic: bool = True) -> Any:
        """Compiled function, if this model's are compiled."""
        return torch.compile(function, dynamic=dynamic) if self.compiled else function

    @torch.no_grad()
    def states(self, ids: Tensor) -> list[Tensor]:
        """Hidden states: each layer's input, and the last one's output."""
        states, tables = [F.embedding(ids, self.embedding)], (self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        for layer in self.layers:
            states.append(self.block(states[-1], layer, tables))
        return states


def layer_of(weights: dict[str, Tensor], number: int) -> Layer:
    """Weights of one layer."""
    names = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split()
    norm1, q, k, v, o, norm2, gate, up, down = (weights[f"blk.{number}.{name}.weight"] for name in names)
    # In GGUF the two halves of what is rotated alternate; here, as in transformers, one follows the other.
    q, k = (each.view(-1, HEAD // 2, 2, each.shape[1]).transpose(1, 2).reshape(each.shape) for each in (q, k))
    return Layer(norm1, torch.cat([q, k, v]), o, norm2, torch.cat([gate, up]), down)


def read_weights(folder: Path, device: str, random: bool = False) -> dict[str, Tensor]:
    """Weights in float32 from the pieces that ``pack.py`` wrote; those that are missing may be random ones."""
    weights: dict[str, Tensor] = {}
    sizes: dict[str, Any] = {}
    for piece in sorted(folder.glob("piece*.safetensors")):
        with safe_open(piece, "pt", device=device) as file:
            abouts = {name: about.split() for name, about in file.metadata().items()}  # of all pieces' weights
            sizes |= {name: tuple(map(int, about[1:])) for name, about in abouts.items()}
            for name in file.keys():  # noqa: SIM118
                weights[name] = dequantize(file.get_tensor(name), abouts[name][0]).view(sizes[name])
    missing = sizes.keys() - weights.keys()
    assert random or not missing, f"{len(missing)} weights are missing: is a piece?"
    return weights | {name: torch.randn(sizes[name], device=device) / sizes[name][-1] ** 0.5 for name in missing}


def dequantize(raw: Tensor, kind: str) -> Tensor:
    """Weights in float32 from GGUF's bytes: 32 to a block, with a scale, and with their least value in Q4_1."""
    if kind == "F32":
        return raw.view(torch.float32)
    blocks = raw.view(-1, {"Q4_1": 20, "Q8_0": 34}[kind])
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind == "Q8_0":
        return blocks[:, 2:].contiguous().view(torch.int8).float() * scale
    least = blocks[:, 2:4].contiguous().view(torch.float16).float()
    return torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).float() * scale + least


class Decoder:
    """Buffers of fixed size for a batch of answers, and a CUDA graph of the decode step for each window."""

    def __init__(self, model: Model, rows: int, length: int, graphs: bool = True) -> None:
        self.model, self.rows, self.length = model, rows, -(-length // WINDOW) * WINDOW
        kv_heads = (len(model.layers[0].qkv) - model.embedding.shape[1]) // (2 * HEAD)
        size, device = (len(model.layers), rows, kv_heads, self.length, HEAD), model.device
        self.keys, self.values = (torch.zeros(size, dtype=model.dtype, device=device) for _ in range(2))
        self.token, self.position = torch.zeros(2, rows, dtype=torch.long, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(rows, 1, device=device)
        self.numbers = torch.arange(max(self.length, rows), device=device)
        self.capture = graphs and device.type == "cuda"
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.capture else None  # shared: graphs run one at a time

    @torch.no_grad()
    def write(self, prompts: Sequence[Any], new: int, temperatures: Any = 0.0, whole: bool = False) -> list[Any]:
        """Answers of at most ``new`` tokens, the one that ends them included; temperature 0 is greedy.

        Unless they are to be ``whole``, an answer ends where it begins to loop, and all end when most have.
        """
        used, longest = len(prompts), max(map(len, prompts))
        ids, lengths = np.zeros((self.rows, longest), np.int64), np.ones(self.rows, np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        self.position.copy_(torch.from_numpy(lengths))
        self.temperature[:used, 0] = torch.as_tensor(temperatures, dtype=torch.float32, device=self.model.device)
        self.ended.copy_(self.numbers[: self.rows] >= used)
        x = self._prefill(torch.from_numpy(ids).to(self.model.device))
        self._choose(x[self.numbers[: self.rows], self.position - 1])
        texts = torch.full((self.rows, new), -1, device=self.model.device)
        for step in range(new):
            texts[:, step] = self.token
            # To look at the rows waits for the device: not at each step.
            if step + 1 == new or (step % 16 == 15 and self.ended[:used].float().mean() > (0.99999 if whole else 0.9)):
                break
            self._advance(min(self.length, -(-(longest + step + 1) // WINDOW) * WINDOW))
        texts = texts[:used]
        ends = ((texts >= 0) & ((texts == STOP).cumsum(1) - (texts == STOP).long() == 0)).sum(1)
        ends = ends if whole else torch.minimum(ends, loop_ends(texts))
        return [row[:end] for row, end in zip(texts.cpu().numpy().astype(np.uint16), ends.tolist(), strict=True)]

    def _prefill(self, ids: Tensor) -> Tensor:
        x, length = F.embedding(ids, self.model.embedding), ids.shape[1]
        tables = self.model.cos[:length], self.model.sin[:length]
        for layer, keys, values in zip(self.model.layers, self.keys, self.values, strict=True):
            q, k, v = self.model.project(x, layer.norm1, layer.qkv, tables)
            keys[:, :, :length] = k  # right of a prompt no step attends to them before it has put its own there
            values[:, :, :length] = v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.model.finish(x, attended, *layer[2:])
        return x

    def _step(self, window: int) -> None:
        """Feed each row's token and put the next one in its place; rows that have ended stay as they are."""
        x = F.embedding(self.token, self.model.embedding)[:, None]
        tables = self.model.cos[self.position][:, None, None], self.model.sin[self.position][:, None, None]
        seen = (self.numbers[:window] <= self.position[:, None])[:, None, None]
        for layer, keys, values in zip(self.model.layers, self.keys, self.values, strict=True):
            q, k, v = self.model.project(x, layer.norm1, layer.qkv, tables)
            here = self.position.view(-1, 1, 1, 1).expand(k.shape)
            keys.scatter_(2, here, k)
            values.scatter_(2, here, v)
            # Heads that share keys stand as positions: with a mask, attention would copy the keys for each.
            q = q.reshape(self.rows, keys.shape[1], -1, HEAD)
            attended = F.scaled_dot_product_attention(q, keys[:, :, :window], values[:, :, :window], seen)
            x = self.model.finish(x, attended.reshape(self.rows, -1, 1, HEAD), *layer[2:])
        self.position += ~self.ended
        self._choose(x[:, 0])

    def _choose(self, x: Tensor) -> None:
        """Choose the best token by its logit plus Gumbel noise times the temperature."""
        logits = F.linear(norm(x, self.model.norm), self.model.embedding).float()
        # Torch's own generator, which a capture registers. The bound: 0 has no logarithm, and 0 x inf is no number.
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()
        best = logits.addcmul_(noise, self.temperature, value=-1).argmax(-1)
        self.token.copy_(best.masked_fill(self.ended, STOP))
        self.ended |= self.token == STOP

    def _advance(self, window: int) -> None:
        """Make a step: from the window's graph, or as it is, which a capture needs once."""
        if window in self.graphs:
            self.graphs[window].replay()
            return
        self._step(window)
        if self.capture:
            stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self.pool):
                    self._step(window)  # nothing is computed
                self.graphs[window] = graph
            except RuntimeError as error:
                print("without CUDA graphs:", error, flush=True)
                torch.cuda.set_stream(stream)  # a capture that failed may leave its own
                self.capture = False


def loop_ends(texts: Tensor, size: int = 6, times: int = 5) -> Tensor:
    """Length at which each text begins to loop: the same ``size`` tokens stand for the fifth time."""
    width = texts.shape[1]
    powers = torch.tensor([1_000_003**power % 2**61 for power in range(size)], device=texts.device)
    hashes = (texts.unfold(1, size, 1) * powers).sum(-1)
    again = torch.cat([(part[:, :, None] == part[:, None]).tril(-1).sum(-1) for part in hashes.split(256)])
    return torch.where(again >= times - 1, torch.arange(size, width + 1, device=texts.device), width).amin(1)
