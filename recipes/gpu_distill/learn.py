"""Learn an adapter for SmolLM2's speeds on one GPU within minutes, and go on from what an earlier run saved.

    python learn.py IN OUT --stop 545        IN: what pack.py made, with the state files of an earlier run if any

1. The full model answers prompts. 2. Several forms learn from the same batches. 3. The best of them on held-out
questions learns alone until ``--stop``; its state is saved every minute. OUT/log.jsonl tells all. Forms:
``maps`` (bypasses and bottlenecks alone), ``lora64``, ``lora128`` (any rank), ``all`` (whole private layers, too large
to save), ``spread128`` (skipped layers are spread), ``late128`` (1.25x skips from layer 12 on, not 5).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, pad

from model import Decoder, Model, norm, read_weights

BEGIN = time.monotonic()
SPEEDS = (1.25, 1.5, 2.0)
KEPT = 5  # bottom layers that every speed runs
FIRST = 3  # the lowest layer with a bottleneck: what is below it is the full model's
RANK = 256  # of bypasses and bottlenecks
PARTS = ("qkv", "o", "gate_up", "down")  # matrices of a layer that have a LoRA
CHUNK = 4096  # positions whose logits are in memory at a time
FILE_BYTES = 14_000_000  # a file has at most one tensor more; of a call 16 MiB a file come back
MILESTONES = (1e6, 3e6, 10e6, 20e6, 40e6)  # tokens after which the curve has a point
RATES = {"map": 1.5e-3, "bias": 1e-3, "lora": 1e-3, "private": 3e-4}  # the first of Muon, the others of AdamW
DEFAULTS = {
    "stop": 545.0,  # seconds after which all is saved and measured
    "reserve": 25.0,  # of these, for the last save and the last measure
    "write": 80.0,  # seconds of writing answers
    "compare": 90.0,  # seconds in which all forms learn
    "forms": "lora64,lora128,all,spread128",
    "main": "best",  # the form that learns on alone
    "tokens": 32768,  # positions of a batch
    "rows": 2048,  # answers that are written at a time
    "new": 384,  # tokens of an answer at most
    "length": 512,  # tokens of a prompt and its answer at most
    "judge": 128,  # held-out questions to measure on, and twice as many prompts of people
    "judged": 96,  # tokens of each answer to measure on
    "rate": 1.0,  # factor of the learning rates
    "random": 0,  # 1: weights that are missing are random, to try all else
    "compile": 1,  # 0: neither compiled functions nor CUDA graphs
}
Text = tuple[Any, Any]  # token ids of a prompt and of its answer
Layers = tuple[int, ...]  # that a speed runs, from FIRST on


class Batch:
    """Texts in the full model, padded on the right: ``states`` are each layer's input, and the last one's output.

    ``answer`` are the positions after the prompt, which run a speed's layers. ``learnt`` are those of the flattened
    batch that an answer's next token follows, so no padding, and ``row`` is the text of each of them.
    """

    def __init__(self, model: Model, texts: Sequence[Text]) -> None:
        lengths = [len(prompt) + len(answer) for prompt, answer in texts]
        ids = np.zeros((len(texts), -(-max(lengths) // 64) * 64), np.int64)
        answer, learnt = np.zeros((2, *ids.shape), bool)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            ids[row, :length] = np.concatenate(text)
            answer[row, len(text[0]) :] = True
            learnt[row, len(text[0]) : length - 1] = True
        where = np.flatnonzero(learnt)
        arrays = (answer[..., None], where, where // ids.shape[1])
        self.answer, self.learnt, self.row = (torch.from_numpy(each).to(model.device) for each in arrays)
        self.states = model.states(torch.from_numpy(ids).to(model.device))

    def pick(self, x: Tensor) -> Tensor:
        """Hidden states at the positions learnt from."""
        return x.flatten(0, 1).index_select(0, self.learnt)


def batches(texts: Sequence[Text], positions: int, rng: np.random.Generator) -> Iterator[list[Text]]:
    """Endless batches of at most ``positions``, of texts of like lengths, in random order."""
    while True:
        keys = np.array([len(prompt) + len(answer) for prompt, answer in texts]) + rng.integers(0, 24, len(texts))
        made: list[list[Text]] = [[]]
        for index in np.argsort(keys):
            if made[-1] and -(-keys[index] // 64) * 64 * (len(made[-1]) + 1) > positions:
                made.append([])
            made[-1].append(texts[index])
        yield from (made[place] for place in rng.permutation(len(made)))


def layers_of(name: str, speed: float, total: int) -> Layers:
    """Layers from ``FIRST`` on that a speed runs in a form."""
    skips = [round(total * (1 - 1 / each)) for each in reversed(SPEEDS) if each >= speed]
    start = 12 if name == "late" and speed == SPEEDS[0] else KEPT
    gone = list(range(start, start + skips[-1]))
    if name == "spread":  # what a slower speed skips, the faster ones skip too; the last two layers always run
        gone = list(range(KEPT, total - 2))
        for skip in skips:
            gone = [gone[int((i + 0.5) * len(gone) / skip)] for i in range(skip)]
    return tuple(layer for layer in range(FIRST, total) if layer not in gone)


class Form:
    """What is learnt: a bypass for each gap, bottlenecks, and a LoRA for the layers above the first gap.

    Weights are float32, by the package's names: ``stand_ins.5-15.down``, ``bottlenecks.15.up``; beside these
    ``lora.15.qkv.A`` (rank, in) and ``lora.15.qkv.B`` (out, rank), or ``private.15.qkv``. Those that ``start`` lacks
    have no effect at first; of bypasses :meth:`fit` then makes better ones.
    """

    def __init__(self, kind: str, model: Model, start: dict[str, Tensor], rate: float = 1.0, tokens: int = 0) -> None:
        name, lora = re.fullmatch(r"(maps|all|lora|spread|late)(\d*)", kind).groups()  # type: ignore[union-attr]
        self.kind, self.model, self.tokens = kind, model, tokens
        self.compare = model.compile(compare, dynamic=False)
        self.paths = [layers_of(name, speed, len(model.layers)) for speed in SPEEDS]
        gaps = sorted({(a + 1, b) for path in self.paths for a, b in pairwise(path) if b > a + 1})
        above = {layer for path in self.paths for place, layer in enumerate(path) if layer != FIRST + place}
        self.private = sorted(above) if name != "maps" else []
        self.exact = {f"{layer}.{part}": getattr(model.exact[layer], part) for layer in self.private for part in PARTS}
        width = model.embedding.shape[1]
        rank = min(RANK, width)
        # The package has a bottleneck before every fourth layer.
        low = [f"bottlenecks.{layer}" for layer in sorted({*sum(self.paths, ())}) if layer % 4 == 3]
        low += [f"stand_ins.{a}-{b}" for a, b in gaps]
        shapes: dict[str, tuple[int, ...]] = {f"{each}.down": (width, rank) for each in low}
        shapes.update({f"{each}.up": (rank, width) for each in low})
        shapes.update({f"stand_ins.{a}-{b}.bias": (width,) for a, b in gaps})
        if lora:
            shapes.update({f"lora.{each}.A": (int(lora), exact.shape[1]) for each, exact in self.exact.items()})
            shapes.update({f"lora.{each}.B": (len(exact), int(lora)) for each, exact in self.exact.items()})
        else:
            start = start | {f"private.{each}": exact for each, exact in self.exact.items()}
            shapes.update({f"private.{each}": exact.shape for each, exact in self.exact.items()})
        self.weights: dict[str, Tensor] = {}
        for each, shape in shapes.items():
            value = start.get(each)
            if value is None or value.shape != shape:
                value = torch.randn(shape) * width**-0.5 if each.endswith(("A", ".down")) else torch.zeros(shape)
            self.weights[each] = value.detach().to(model.device, torch.float32, copy=True).requires_grad_()
        self.upper = [weight for each, weight in self.weights.items() if each.startswith(("lora", "private"))]
        maps = [self.weights[f"{each}.{part}"] for each in low for part in ("down", "up")]
        muon = torch.optim.Muon(maps, RATES["map"], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        # Muon takes no biases, and AdamW no empty group.
        biases = [weight for weight in self.weights.values() if weight.ndim == 1]
        groups: list[Any] = [{"params": biases, "lr": RATES["bias"]}]
        groups += [{"params": self.upper, "lr": RATES["lora" if lora else "private"]}] if self.upper else []
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0, fused=model.device.type == "cuda")
        self.optimizers: list[torch.optim.Optimizer] = [muon, adam]
        for group in muon.param_groups + adam.param_groups:
            group["peak"] = group["lr"] * rate

    def used(self) -> dict[str, Tensor]:
        """Weights of a pass in the model's dtype: a LoRA is added to float32 weights before they are rounded."""
        used = {name: weight.to(self.model.dtype) for name, weight in self.weights.items()}
        for name, exact in self.exact.items() if self.kind != "all" else ():
            merged = exact + self.weights[f"lora.{name}.B"] @ self.weights[f"lora.{name}.A"]
            used[f"private.{name}"] = merged.to(self.model.dtype)
        return used

    def along(self, path: Layers, batch: Batch, used: dict[str, Tensor], done: dict[Layers, Tensor]) -> Tensor:
        """Hidden states after a path's layers; ``done`` keeps them by path, since speeds share the first layers.

        Those of prompts stay the full model's.
        """
        if not path or path in done:
            return done[path] if path else batch.states[FIRST]
        x, layer, before = self.along(path[:-1], batch, used, done), path[-1], path[-2] if path[1:] else FIRST - 1
        model, answer, full = self.model, batch.answer, batch.states
        tables = model.cos[: x.shape[1]], model.sin[: x.shape[1]]
        if layer > before + 1:
            weights = [used[f"stand_ins.{before + 1}-{layer}.{name}"] for name in ("down", "up", "bias")]
            x = torch.where(answer, model.bypass(x, *weights), full[layer])
        if layer % 4 == 3:
            weights = [used[f"bottlenecks.{layer}.{name}"] for name in ("down", "up")]
            x = torch.where(answer, model.bottleneck(x, *weights), x)
        if layer in self.private:
            own = [used[f"private.{layer}.{part}"] for part in PARTS]
            x = model.private_block(x, full[layer], answer, model.layers[layer], own, tables)
            done[path] = torch.where(answer, x, full[layer + 1])
        else:
            done[path] = model.block(x, model.layers[layer], tables)
        return done[path]

    def distance(self, batch: Batch, backward: bool = False) -> tuple[Tensor, Tensor]:
        """KL from the full model, and whether the next token is the same, both (speeds, positions learnt from).

        ``backward`` adds the gradient of the mean KL to the weights: of all speeds at once, so that a LoRA is merged
        once and layers that speeds share run once.
        """
        used, done, model = self.used(), dict[Layers, Tensor](), self.model
        students = torch.stack(
            [norm(batch.pick(self.along(path, batch, used, done)), model.norm) for path in self.paths]
        )
        teacher = norm(batch.pick(batch.states[-1]), model.norm)
        kl, same, gradient = divergence(students.detach(), teacher, model.embedding, self.compare)
        if backward:
            students.backward(gradient / kl.numel())
        return kl, same

    def step(self, batch: Batch, rate: float) -> Tensor:
        """KL of each speed on a batch, before learning from it at this share of the learning rates."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        kl, _ = self.distance(batch, backward=True)
        torch.nn.utils.clip_grad_norm_(self.upper, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
        self.tokens += len(batch.learnt)
        return kl.mean(1)

    @torch.no_grad()
    def fit(self, some: Sequence[Batch]) -> None:
        """Give bypasses without effect the closed form: ridge from a speed's states to the full model's after a gap."""
        width, done = self.model.embedding.shape[1], [dict[Layers, Tensor]() for _ in some]
        for path in self.paths:
            for place, (before, layer) in enumerate(pairwise(path), 1):
                name = f"stand_ins.{before + 1}-{layer}"
                if layer == before + 1 or self.weights[f"{name}.up"].any():
                    continue
                used, sums = self.used(), torch.zeros(2 * width + 1, 2 * width + 1, dtype=torch.float64)
                for batch, states in zip(some, done, strict=True):
                    x = batch.pick(self.along(path[:place], batch, used, states)).double()
                    joined = torch.cat([x, batch.pick(batch.states[layer]).double() - x, torch.ones_like(x[:, :1])], 1)
                    sums = sums.to(x.device) + joined.T @ joined
                mean = sums[-1, :-1] / sums[-1, -1]
                covariance = sums[:-1, :-1] / sums[-1, -1] - torch.outer(mean, mean)
                xx = covariance[:width, :width] + 0.01 * covariance.diagonal()[:width].mean() * torch.eye(width).to(
                    mean
                )
                best = torch.linalg.solve(xx, covariance[:width, width:])
                up = torch.linalg.eigh(best.T @ xx @ best)[1][:, -min(RANK, width) :].T  # where its values vary most
                values = {"down": best @ up.T, "up": up, "bias": mean[width:] - mean[:width] @ best @ up.T @ up}
                for part, value in values.items():
                    self.weights[f"{name}.{part}"].copy_(value)

    def save(self, folder: Path) -> None:
        """Write all weights in bfloat16, in files that can come back; old ones stay until the new ones are whole."""
        files: dict[int, dict[str, Tensor]] = {}
        size = 0
        for name, weight in self.weights.items():
            tensor = weight.detach().to("cpu", torch.bfloat16).contiguous()
            files.setdefault(size // FILE_BYTES, {})[name] = tensor
            size += tensor.nbytes
        for number, each in files.items():
            save_file(each, folder / f"new{number}", {"form": self.kind, "tokens": str(self.tokens)})
        for old in folder.glob("state*.safetensors"):
            old.unlink()
        for number in files:
            os.replace(folder / f"new{number}", folder / f"state{number}.safetensors")

    @classmethod
    def read(cls, kind: str, model: Model, folder: Path, rate: float = 1.0) -> Form:
        """Form that goes on from saved states, if they are of its kind, else begins with what is of use to it."""
        start: dict[str, Tensor] = {}
        tokens = 0
        for path in [*folder.glob("adapter.safetensors"), *sorted(folder.glob("state*.safetensors"))]:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                form = about.get("form", "adapter")
                tokens = int(about["tokens"]) if form == kind else 0
                # What was learnt for one gap is no start for many, nor the other way round.
                if kind.startswith("spread") == form.startswith("spread"):
                    start |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(kind, model, start, rate, tokens)


def compare(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL of each position, whether both choose the same token, and the gradient by the student's logits."""
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    p, same = log_p.exp(), student.argmax(-1) == teacher.argmax(-1)
    return (p * (log_p - log_q)).sum(-1), same, (log_q.exp() - p).to(student.dtype)


@torch.no_grad()
def divergence(students: Tensor, teacher: Tensor, head: Tensor, function: Any) -> tuple[Tensor, Tensor, Tensor]:
    """KL by normed states (speeds, positions, width), sameness, and the gradient of its sum by the students' states.

    Logits of a chunk at a time are in memory, and the gradient is made while they are.
    """
    kl, gradient = torch.empty(students.shape[:2], device=head.device), torch.empty_like(students)
    same = torch.empty_like(kl, dtype=torch.bool)
    for start in range(0, len(teacher), CHUNK):
        part = slice(start, min(start + CHUNK, len(teacher)))
        size = part.stop - start
        fill = (0, 0, 0, CHUNK - size if head.is_cuda else 0)  # so that one shape is compiled
        target = linear(pad(teacher[part], fill), head)
        for speed, student in enumerate(students):
            found = function(linear(pad(student[part], fill), head), target)
            kl[speed, part], same[speed, part] = found[0][:size], found[1][:size]
            gradient[speed, part] = found[2][:size] @ head
    return kl, same, gradient


@torch.no_grad()
def measure(form: Form, texts: Sequence[Text]) -> dict[str, list[float]]:
    """By speed: KL, half of its 95% interval over prompts, share of the same next token, half of its interval."""
    sums, counts = [], []
    for start in range(0, len(texts), 32):
        batch = Batch(form.model, texts[start : start + 32])
        both = torch.stack([each.float() for each in form.distance(batch)]).permute(2, 0, 1)
        counts.append(torch.bincount(batch.row))
        sums.append(torch.zeros(len(counts[-1]), *both.shape[1:], device=both.device).index_add_(0, batch.row, both))
    total, count = torch.cat(sums).double(), torch.cat(counts)[:, None, None]
    mean = total.sum(0) / count.sum()
    half = 1.96 * (total - mean * count).square().sum(0).sqrt() / count.sum()
    figures = torch.stack([mean, half], 1).flatten(0, 1).T.tolist()
    return {f"{speed:g}": [round(each, 4) for each in row] for speed, row in zip(SPEEDS, figures, strict=True)}


class Run:
    """One run: options, log, prompts, texts to measure on, and the forms that learn."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.parts, kinds = options, 1, options.forms.split(",")
        self.judged: dict[str, list[Text]] = {}
        assert options.main in ("best", *kinds), f"{options.main} is not among the forms"
        assert kinds != ["all"] != [options.main], "private layers are too large to save"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = Model(read_weights(options.inputs, device, options.random == 1), dtype, options.compile == 1)
        self.forms = {kind: Form.read(kind, self.model, options.inputs, options.rate) for kind in kinds}
        # A later run must not write again what an earlier one did.
        torch.manual_seed(sum(form.tokens for form in self.forms.values()))
        self.rng = np.random.default_rng(torch.initial_seed())
        self.decoder = Decoder(self.model, options.rows, options.length, options.compile == 1)
        packed = np.load(options.inputs / "prompts.npz")
        names = {"learn": None, "held_out": options.judge, "people": 2 * options.judge}
        prompts = {name: np.split(packed[name], packed[f"{name}_ends"][:-1])[:limit] for name, limit in names.items()}
        self.prompts = prompts.pop("learn")
        for name, each in prompts.items():
            pairs = zip(each, self.decoder.write(each, options.judged, whole=True), strict=True)
            self.judged[name] = [text for text in pairs if len(text[1]) > 1]
        self.log("start", torch=torch.__version__, device=device, options={k: str(v) for k, v in vars(options).items()})

    def log(self, event: str, **fields: Any) -> None:
        """Print a line of JSON, and add it to the log."""
        line = json.dumps({"event": event, "at": round(time.monotonic() - BEGIN, 1), **fields})
        print(line, flush=True)
        with open(self.options.outputs / "log.jsonl", "a") as file:
            file.write(line + "\n")

    def left(self) -> float:
        """Seconds until the last save."""
        return float(self.options.stop - self.options.reserve - (time.monotonic() - BEGIN))

    def answers(self, until: float) -> list[Text]:
        """Answers of the full model to all prompts, then again to all, until so many seconds are left."""
        texts: list[Text] = []
        shares = [0.4, 0.3, 0.3]
        while True:
            order = np.argsort([len(prompt) + self.rng.random() for prompt in self.prompts])
            groups = np.split(order, range(self.options.rows, len(order), self.options.rows))
            for place in self.rng.permutation(len(groups)):
                if texts and self.left() <= until:
                    return texts
                prompts = [self.prompts[index] for index in groups[place]]
                temperatures = self.rng.choice([0.0, 0.5, 0.9], len(prompts), p=shares)
                new = min(self.options.new, self.options.length - max(map(len, prompts)))
                written = self.decoder.write(prompts, new, temperatures)
                texts += [text for text in zip(prompts, written, strict=True) if len(text[1]) > 4]
            shares = [0.0, 0.5, 0.5]  # a greedy answer would be the same again

    def measure(self, event: str, forms: dict[str, Form], *names: str) -> dict[str, float]:
        """KL of each form on held-out questions, the mean of its speeds; all figures go to the log."""
        found = {}
        for kind, form in forms.items():
            figures = {name: measure(form, self.judged[name]) for name in names}
            self.log(event, form=kind, tokens=form.tokens, **figures)
            found[kind] = sum(each[0] for each in figures["held_out"].values()) / len(SPEEDS)
        return found

    def learn(self, texts: Iterator[list[Text]], until: float, last: bool) -> None:
        """Let forms learn from the same batches until so many seconds are left; the ``last`` part lets rates fall."""
        begin = self.left()
        steps, logged, saved = 0, -10.0, 0.0
        while (passed := begin - self.left()) < begin - until:
            rate = min(1.0, (steps + 1) / 20) * (max(0.02, 1 - (passed / (begin - until)) ** 2) if last else 1.0)
            some = next(texts)
            before = {kind: form.tokens for kind, form in self.forms.items()}
            try:
                batch = Batch(self.model, some[: max(1, len(some) // self.parts)])
                kl = {kind: form.step(batch, rate) for kind, form in self.forms.items()}
            except torch.OutOfMemoryError:
                self.parts *= 2  # later batches are cut
                continue
            steps += 1
            if passed - logged >= 10:
                logged = passed
                figures = {kind: [round(float(each), 4) for each in row] for kind, row in kl.items()}
                tokens = {kind: form.tokens for kind, form in self.forms.items()}
                self.log("learn", steps=steps, rate=round(rate, 3), parts=self.parts, tokens=tokens, kl=figures)
                assert np.isfinite([*figures.values()]).all(), "KL is not finite: go on from what was saved last"
            if last and passed - saved >= 60:
                saved = passed
                next(iter(self.forms.values())).save(self.options.outputs)
            for kind, form in self.forms.items():
                if any(before[kind] < milestone <= form.tokens for milestone in MILESTONES):
                    self.measure("curve", {kind: form}, "held_out", "people")

    def work(self) -> None:
        """Write answers, let all forms learn, then the best alone."""
        texts = self.answers(self.left() - self.options.write)
        tokens = sum(len(answer) for _, answer in texts)
        self.log("answers", texts=len(texts), tokens=tokens, graphs=len(self.decoder.graphs))
        del self.decoder  # its buffers are large
        stream = batches(texts, self.options.tokens, self.rng)
        some = [Batch(self.model, next(stream)) for _ in range(4)]
        for form in self.forms.values():
            form.fit(some)
        del some
        self.measure("start", self.forms, "held_out")
        self.learn(stream, self.left() - self.options.compare, last=False)
        found = self.measure("compared", self.forms, "held_out")
        best = min((kind for kind in found if kind != "all"), key=lambda kind: found[kind])
        main = best if self.options.main == "best" else self.options.main
        self.forms = {main: self.forms[main]}
        self.learn(stream, 0.0, last=True)


def main() -> None:
    """Run all parts, and save in time whatever runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", type=Path)
    parser.add_argument("outputs", type=Path)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    options.outputs.mkdir(parents=True, exist_ok=True)
    torch._dynamo.config.recompile_limit = 64
    run = Run(options)
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, run.left() + options.reserve / 3))
    try:
        run.work()
    except KeyboardInterrupt:
        run.log("time is up")
    signal.setitimer(signal.ITIMER_REAL, 0)
    form = next(form for kind, form in run.forms.items() if kind != "all" and options.main in (kind, "best"))
    form.save(options.outputs)
    run.log("saved", form=form.kind, memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
    run.measure("end", {form.kind: form}, "held_out", "people")


if __name__ == "__main__":
    main()
