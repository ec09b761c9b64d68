"""Measuring: on a clock that moves only where work is done, profile, plan and bench agree to the last digit."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from skipdecode.latency.check_profile import check_profile
from torch import nn

from helpers.families import FAMILIES, build
from helpers.tiny import run
from skipdecode import Schedule, SkipCache, attach
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import SkipDecodeError, UsageError
from skipdecode.generation import engine
from skipdecode.generation.batch import generate_batch
from skipdecode.generation.job import GenerationJob
from skipdecode.latency import profiler as profiling
from skipdecode.latency.planner import Predictor, plan, workloads
from skipdecode.latency.profile import Pass, Profile, shape_of
from skipdecode.latency.profiler import FilledCache, Profiler, layer_kinds
from skipdecode.loading.device import machine
from skipdecode.loading.load import DEMO, load_tokenizer, read_config
from skipdecode.model.cache import layer_kv_bytes
from skipdecode.model.inspect import decoder_layers

#: Seconds of work on the clock of these tests: of a layer, by kind, and of each of its positions; of the head.
WEIGHTS, POSITION, HEAD = (0.010, 0.004), 0.0001, 0.030


class WorkClock:
    """``time.perf_counter`` that moves by what attention layers and the head would take, and else stands still."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        _, kinds = layer_kinds(model)
        for layer, kind in zip(decoder_layers(model), kinds, strict=True):
            attention: Any = layer.self_attn
            attention.register_forward_pre_hook(self.attention(WEIGHTS[kind]), with_kwargs=True)
        model.get_output_embeddings().register_forward_hook(self.head)

    def attention(self, weights: float) -> Any:
        """A hook inside a layer, which a skipped layer does not come to."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.now += weights + POSITION * hidden.shape[0] * hidden.shape[1]

        return hook

    def head(self, module: nn.Module, args: Any, output: Any) -> None:
        self.now += HEAD

    def __call__(self) -> float:
        return self.now


@functools.cache
def clocked_model(name: str) -> Any:
    """A model, the clock of its work, and its profile: three batch sizes, lengths within the window and beyond it."""
    model = build(name)
    model.generation_config.eos_token_id = None
    clock = WorkClock(attach(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        return model, clock, Profiler(model, load_tokenizer(str(DEMO)), rounds=1).profile([1, 2, 4], [4, 24])


@pytest.fixture(params=["opt", "gemma3"])
def clocked(request: pytest.FixtureRequest) -> Any:
    """One of them; made once, whatever else its test is asked for."""
    return clocked_model(request.param)


@pytest.fixture
def timed(clocked: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of one kind of layers, and one of two, on a clock of their own work."""
    monkeypatch.setattr(time, "perf_counter", clocked[1])
    return clocked[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Any that decodes: ids are drawn, texts are not looked at."""
    return load_tokenizer(str(DEMO))


@pytest.fixture
def profile(clocked: Any) -> Profile:
    """The model's."""
    return clocked[2]


def test_a_profile_holds_what_the_work_takes(timed: Any, profile: Profile) -> None:
    """Each kind's cost, the head's, and those of each length of prompt come out as they were put in."""
    names, kinds = layer_kinds(timed)
    assert profile.layers == kinds
    assert len(profile.kinds) == len(names) == len(set(kinds))
    assert [(one.batch_size, one.length) for one in profile.prompts] == [(n, m) for n in (1, 2, 4) for m in (4, 24)]
    for one in profile.steps:
        assert one.layers == pytest.approx([w + POSITION * one.batch_size for w in WEIGHTS[: len(names)]], rel=1e-6)
    for one in profile.prompts:
        work = POSITION * one.batch_size * one.length
        assert one.layers == pytest.approx([w + work for w in WEIGHTS[: len(names)]], rel=1e-6)
    for one in (*profile.steps, *profile.prompts):
        assert [one.head, one.rest] == pytest.approx([HEAD, 0], abs=1e-9)
    assert profile.noise == pytest.approx(0)
    assert profile.warning is None
    check_profile(profile, timed.config, "float32")
    with pytest.raises(UsageError, match="another shape"):
        check_profile(profile, build("llama").config, "float32")
    with pytest.raises(UsageError, match="another dtype"):
        check_profile(profile, timed.config, "bfloat16")


def test_a_model_without_a_head_has_steps(timed: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows of no module that makes its logits: what it takes is then part of the rest."""
    monkeypatch.setattr(timed, "get_output_embeddings", lambda: None)
    found = Profiler(timed, tokenizer, 1).steps(2, 4, 8)
    assert [found.head, found.rest] == pytest.approx([0, HEAD])


def test_passes_that_would_take_long_run_fewer_layers(
    timed: Any, tokenizer: Any, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of each kind always: the same costs, for a fraction of the work; and rounds that differ show."""
    depths: list[int] = []
    made = Profiler.steps

    def spied(self: Profiler, size: int, length: int, depth: int) -> Pass:
        depths.append(depth)
        return made(self, size, length, depth)

    monkeypatch.setattr(Profiler, "steps", spied)
    monkeypatch.setattr(profiling, "SECONDS", 0.01)
    calls: list[tuple[int, int]] = []
    hasty = Profiler(timed, tokenizer, 2, lambda *done: calls.append(done))
    found = hasty.profile([1, 2, 4], [4, 24])
    assert min(depths) == depths[-1] == hasty.least < 8
    assert calls == [(n, 24) for n in range(1, 25)]
    for name in ("prompts", "steps"):
        for one, other in zip(getattr(found, name), getattr(profile, name), strict=True):
            assert [one.rest, one.head, *one.layers] == pytest.approx([other.rest, other.head, *other.layers], abs=1e-9)
    one = found.steps[0]
    slow = Pass(one.batch_size, one.length, one.layers, 1.0, 0.0)
    assert profiling._noise([one, slow, slow]) == pytest.approx(1 / (sum(one.layers) + HEAD), rel=0.3)
    assert profiling._fastest([slow, one]).rest == one.rest


@pytest.mark.parametrize("name", [name for name in ("gemma3", "gemma4-shared", "gpt-oss") if name in FAMILIES])
def test_the_fewest_layers_measured_are_of_every_kind(name: str, tokenizer: Any) -> None:
    """Also where layers that lend their keys have to run first."""
    model = attach(build(name))
    model.generation_config.eos_token_id = None
    profiler = Profiler(model, tokenizer, 1)
    assert len(profiler.kinds) > 1
    assert len(profiler.steps(1, 4, profiler.least).layers) == len(profiler.kinds)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ("opt", "gemma3", "mistral-sliding", "qwen3.5", "falcon-h1", "gemma4-shared", "gpt-oss")
        if name in FAMILIES
    ],
)
@pytest.mark.parametrize("length", [1, 3, 12])
def test_a_filled_cache_is_one_after_a_prompt(name: str, length: int, tokenizer: Any) -> None:
    """Windows, states and room: each layer holds as much, and the same layers run, as after a prompt of that length."""
    model, schedule, steps = attach(build(name)), Schedule(8, 6, 2, 7, prompt_layers="max"), 9
    model.generation_config.eos_token_id = None
    ids = [[5 + (row + column) % 90 for column in range(length + 1)] for row in range(2)]
    first = torch.tensor([row[:1] for row in ids])

    def held(cache: SkipCache, prompt: list[list[int]], new: int) -> Any:
        generate_batch(model, tokenizer, prompt, lambda _: cache, min_new_tokens=new, max_new_tokens=new)
        return cache.step_depths, [layer_kv_bytes(layer) for layer in cache.layers], cache.get_seq_length()

    filled = held(FilledCache(model, schedule, first, length), ids, steps)
    assert filled == held(SkipCache(model, schedule), [row[:length] for row in ids], steps + 1)
    assert len(filled[0]) == steps


CLOCKS = ("layers", "step", "job")
STYLES: tuple[dict[str, Any], ...] = ({}, {"prompt_layers": "max"}, {"order": "even", "prompt_layers": 6})


_ON_THE_CLOCK = {"clock": "job", "profile": "p.json", "speedup": 2}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clock": "job", "speedup": 2}, "need a profile"),
        ({"clock": "seconds", "speedup": 2}, "a clock is"),
        ({"profile": "p.json", "speedup": 2}, "need a profile"),
        ({"clock": "job", "profile": "p.json"}, "a clock needs a speedup"),
        ({"clock": "job", "profile": "p.json", "speedup": 2, "offload": "disk"}, "knows no offload"),
        ({"clock": "job", "profile": "p.json", "speedup": 1}, "go with a speedup"),
        (
            {"clock": "job", "profile": "p.json", "speedup": 2, "options": {"num_beams": 2, "max_new_tokens": 8}},
            "without beams",
        ),
        ({"clock": "job", "profile": "p.json", "speedup": 99}, "cannot be had"),
        ({"clock": "job", "profile": "p.json", "speedup": 2, "dtype": "bfloat16"}, "another dtype"),
        ({"clock": "job", "profile": "p.json", "speedup": 2, "prepack": True}, "another options"),
    ],
)
def test_a_job_on_the_clock_is_refused_before_weights_are_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    """What a profile does not know is said, not guessed."""
    monkeypatch.chdir(tmp_path)
    config = read_config(str(checkpoint))
    here = machine("cpu")
    _made(shape=shape_of(config), machine=here, device="cpu").save("p.json")
    monkeypatch.setattr(engine, "load", None)
    with pytest.raises(SkipDecodeError, match=says):
        GenerationJob(str(checkpoint), ["the cat", "a dog sat"], **{"options": {"max_new_tokens": 8}} | options).run()


def test_a_job_on_the_clock_runs_what_is_planned(checkpoint: Path, tmp_path: Path) -> None:
    """The schedule is the one planned for the job's own batches, and the summary says what the target is of."""
    config = read_config(str(checkpoint))
    profile = _made(shape=shape_of(config), machine=machine("cpu"), device="cpu")
    prompts = ["the cat sat on a mat", "a dog", "the river by a log", "a house"]
    job = GenerationJob(
        str(checkpoint), prompts, speedup=2, clock="job", profile=profile, prompt_layers="max", batch_size=2,
        options={"max_new_tokens": 12, "min_new_tokens": 12},
    )  # fmt: skip
    summary = job.run().summary
    lengths = [len(ids) for ids in encode_prompts(load_tokenizer(str(checkpoint)), prompts)]
    schedule = plan(Predictor(profile, workloads(lengths, 2, 12), "job"), 2, prompt_layers="max")
    assert summary["average_depth"] == pytest.approx(schedule.average_depth(11), abs=0.01)
    assert (summary["target_speedup"], summary["target_of"]) == (2, "job")


def _made(**placed: Any) -> Profile:
    """A profile of eight layers that cost what they cost everywhere."""
    passes = [Pass(size, length, (0.01,), 0.01, 0.0) for size in (1, 32) for length in (4, 90)]
    both: dict[str, Any] = {"prompts": tuple(passes), "steps": tuple(passes)}
    return Profile(model="made", dtype="float32", kinds=("layer",), layers=(0,) * 8, **both, **placed)


def test_a_plan_for_a_model_has_its_trained_style(checkpoint: Path, tmp_path: Path) -> None:
    """What ``plan MODEL`` shows is what ``generate MODEL --clock`` runs."""
    config = read_config(str(checkpoint))
    _made(shape=shape_of(config), machine="there", device="cpu").save(tmp_path / "p.json")
    done = run("plan", checkpoint, "--profile", tmp_path / "p.json", "--new-tokens", 20, "--decay", "cosine", "--json")
    assert done.returncode == 0, done.stderr
    assert "this is another machine" in done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert {row["schedule"]["decay"] for row in rows if "schedule" in row and row["asked"] > 1} == {"cosine"}
    _made(shape=shape_of(config), machine="a GPU", device="cuda:7").save(tmp_path / "p.json")  # none here
    done = run("plan", checkpoint, "--profile", tmp_path / "p.json", "--new-tokens", 20)
    assert done.returncode == 0, done.stderr
    assert "measured on: a GPU" in done.stdout
    _made(shape="another", machine="there", device="cpu").save(tmp_path / "p.json")
    assert run("plan", checkpoint, "--profile", tmp_path / "p.json").returncode == 2
