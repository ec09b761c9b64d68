"""What held when it was attacked, kept in small; `make torture` does the same at length."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skipdecode.data.inputs import read_items
from skipdecode.generation.journal import Journal
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from helpers.families import LAYERS, SCHEDULES, TOP, build, distance, naive, prompts, reference_logits, run
from helpers.tiny import TEXTS, no_file_above
from helpers.tiny import run as command
from skipdecode import Schedule, attach, detach
from skipdecode.data.tasks import get_task
from skipdecode.errors import SkipDecodeError
from skipdecode.evaluation import evaluate as evaluation
from skipdecode.files import parse_json, write
from skipdecode.generation.job import JobResult
from skipdecode.generation.stats import Completion, GenerationStats
from skipdecode.model.inspect import decoder_layers, gates_of


@pytest.fixture(scope="module")
def checkpoint(shallow_checkpoint: Path) -> Path:
    """Four layers."""
    return shallow_checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": t[:9], "response": t[10:]}) + "\n" for t in TEXTS[:8]))
    return path


# --- kills and disks


class KilledError(BaseException):
    """Stands for SIGKILL: nothing catches it."""


SHORT = ("--max-new-tokens", 4, "--batch-size", 4, "--repeats", 1, "--timing-rows", 2)


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The rows of a table without what a clock says."""
    rows = json.loads((folder / "table.json").read_text())["rows"]
    return [{k: v for k, v in row.items() if not any(w in k for w in ("seconds", "clock", "step_ms"))} for row in rows]


def test_an_evaluation_killed_at_every_write_is_that_of_one_that_was_not(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held: all rows are there once, equal but for clock figures."""
    arguments = ["evaluate", checkpoint, "--data", data, *SHORT, "--speedups", "1,2,4", "--output"]
    assert command(*arguments, tmp_path / "whole").returncode == 0
    killed: list[Path] = []

    def deadly(path: Path, text: str) -> None:
        if path not in killed:
            killed.append(path)
            if len(killed) % 2:  # before the write, or after it
                raise KilledError
            write(path, text)
            raise KilledError
        write(path, text)

    monkeypatch.setattr(evaluation, "write", deadly)
    for kills in (1, 2, 3):
        with pytest.raises(KilledError):
            command(*arguments, tmp_path / "killed")
        assert len(killed) == kills
    assert command(*arguments, tmp_path / "killed").returncode == 0
    assert len(killed) == 3
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    verb: str, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """Held: whichever file does not fit, journal, output, row or table."""
    options = {
        "generate": ["--input", data, "--speedup", 2, "--max-new-tokens", 4, "--batch-size", 2],
        "evaluate": ["--data", data, *SHORT, "--speedups", "1,2"],
    }[verb]
    whole, target = tmp_path / "whole", tmp_path / "target"
    assert command(verb, checkpoint, *options, "--output", whole).returncode == 0
    failures = 0
    for size in (1, 150, 700, 1200):
        with no_file_above(size):
            done = command(verb, checkpoint, *options, "--output", target)
        if done.returncode:
            failures += 1
            assert done.returncode == 2
            assert done.stderr.splitlines()[-1].startswith("skipdecode: ")
            assert not target.is_file()
            assert not list(tmp_path.rglob("*.tmp"))
    assert failures > 1
    if not target.is_file():
        assert command(verb, checkpoint, *options, "--output", target).returncode == 0
    if verb == "generate":
        assert target.read_bytes() == whole.read_bytes()
    else:
        assert timeless(target) == timeless(whole)


def test_a_row_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    """Held: 100,000 rows; here 20,000, in batches: each is written once, at the journal's end, and read back once."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"the cat {i}"}) + "\n" for i in range(20_000)))
    items = read_items(str(source), get_task("jsonl"))
    rows = {i: Completion(f"sat on mat {i:05d}", 4, "stop") for i in range(len(items))}
    sizes = [0]
    with Journal(tmp_path / "out", "job") as journal:
        for start in range(0, len(items), 200):
            keys = range(start, start + 200)
            journal.add(keys, [rows[i] for i in keys], GenerationStats(8, rows=200))
            sizes.append(journal.path.stat().st_size)
        inode = journal.path.stat().st_ino
    growth = [b - a for a, b in pairwise(sizes)]
    assert max(growth[1:]) <= 1.1 * min(growth[1:])
    with Journal(tmp_path / "out", "job") as journal:
        assert journal.path.stat().st_ino == inode
        assert journal.rows == rows
        assert len(journal.costs) == 100
    assert JobResult(items, rows, {}).jsonl.count("\n") == len(items)


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    9,
    10**9,
    2.5,
    float("nan"),
    float("inf"),
    "",
    "top",
    "\ud800",
    [],
    [1, 0],
    {},
    [None],
]


@settings(max_examples=200)
@given(st.data())
def test_a_mutated_schedule_is_a_schedule_or_refused(draw: st.DataObject) -> None:
    """Held: 400 mutated files; whatever one holds, what is taken never goes deeper."""
    values = draw.draw(st.sampled_from(list(SCHEDULES.values()))).to_dict()
    for _ in range(draw.draw(st.integers(1, 3))):
        key = draw.draw(st.sampled_from([*values, "x"]))
        values[key] = draw.draw(st.sampled_from(ODD) | st.integers(0, 20))
    text = json.dumps(values)
    if draw.draw(st.booleans()):
        cut = draw.draw(st.integers(0, len(text)))
        text = text[:cut] + draw.draw(st.sampled_from(["", "]", "[" * 5000, '"', "\0"])) + text[cut + 1 :]
    try:
        plan = Schedule.from_dict(parse_json(text, "the schedule"))
    except SkipDecodeError:
        return
    depths = [plan.depth(step) for step in sorted({0, 1, 2, 5, plan.horizon - 1, plan.horizon})]
    assert depths == sorted(depths, reverse=True)
    assert all(1 <= depth <= plan.num_layers for depth in depths)


# --- models


class Biased(LogitsProcessor):
    """A processor of one's own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.linspace(-2, 2, scores.shape[1]) * (input_ids[:, -1:] % 2)


HABITS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ends": {"eos_token_id": list(range(3, 128, 9)), "min_new_tokens": 3},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    "own processor": {"logits_processor": LogitsProcessorList([Biased()])},
    "samples": {"do_sample": True, "top_k": 9, "temperature": 2.0, "num_return_sequences": 3},
    "nucleus": {"do_sample": True, "top_p": 0.8, "renormalize_logits": True},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -1.0, "eos_token_id": list(range(3, 90, 9))},
    "sampled beams": {"num_beams": 2, "do_sample": True, "early_stopping": True},
}


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize(("name", "key"), [("opt", "top"), ("gemma3", "prompt")])
def test_habits_are_those_of_a_naive_model(name: str, key: str, habit: str) -> None:
    """Held: the same texts as a stock model without a cache whose skipped layers are undone in every pass."""
    model, inputs, plan = build(name), prompts(), SCHEDULES[key]
    options = {"max_new_tokens": plan.horizon + 2} | HABITS[habit]
    torch.manual_seed(3)
    ours = run(model, inputs, plan, **options)
    with naive(model, plan, inputs["input_ids"].shape[1]) as stock:
        torch.manual_seed(3)
        theirs = run(stock, inputs, use_cache=False, **options)
    assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("name", ["opt", "gemma3"])
def test_generate_takes_embeddings(name: str) -> None:
    """Held: inputs_embeds write what their ids do."""
    model, inputs = attach(build(name)), prompts()
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    found = run(model, embeds | {"attention_mask": inputs["attention_mask"]}, TOP).sequences
    assert torch.equal(found, run(model, inputs, TOP).sequences[:, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_skips_too(dtype: torch.dtype) -> None:
    """Held: full depth is the stock model to the bit; skipping is the reference as nearly as the type allows."""
    model, inputs = build("llama").to(dtype), prompts()
    stock = run(model, inputs)
    full = run(model, inputs, Schedule.full(LAYERS))
    assert all(map(torch.equal, stock.logits, full.logits))
    found = run(model, inputs, TOP)
    expected = reference_logits(model, TOP, found.sequences, inputs["attention_mask"])
    assert distance(torch.stack(found.logits, 1).float(), expected.float()) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_models_skip(where: str, tmp_path: Path) -> None:
    """Held: weights that come from elsewhere when a layer runs; a skipped layer's stay where they are."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = build("llama"), prompts()
    expected = run(model, inputs, TOP).sequences
    detach(model)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert torch.equal(run(model, inputs, TOP).sequences, expected)


class Int8(nn.Module):
    """A linear layer whose weights are kept in eight bits, as torchao's and bitsandbytes' are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """As a linear layer does."""
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def test_quantized_layers_skip() -> None:
    """Held: layers need not hold floating-point weights."""
    model, inputs = build("llama"), prompts()
    for layer in decoder_layers(model):
        for name, part in list(layer.named_modules()):
            if isinstance(part, nn.Linear):
                layer.set_submodule(name, Int8(part))
    found = run(model, inputs, TOP)
    expected = reference_logits(model, TOP, found.sequences, inputs["attention_mask"])
    assert distance(torch.stack(found.logits, 1), expected) < 1e-5


def test_an_attached_model_trains_and_saves_as_the_stock_one(tmp_path: Path) -> None:
    """Held: a trainer that knows nothing of us gets the stock gradients, to the bit; what is saved is a stock model."""
    ids, gradients = torch.randint(2, 128, (2, 12)), []
    for gated in (False, True):
        model = build("llama").train()
        if gated:
            attach(model)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    expected = run(model.eval(), prompts(), TOP).sequences
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not gates_of(loaded)
    assert torch.equal(run(loaded, prompts(), TOP).sequences, expected)
