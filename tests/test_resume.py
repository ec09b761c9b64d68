"""A training run that is killed, however and whenever, ends with the weights of one that is not."""

from __future__ import annotations

import os
import re
import shutil
import signal
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from skipdecode.training.callbacks import StepSeed
from skipdecode.training.checkpoints import SEAL, RunFolder
from skipdecode.training.sampler import LengthGrouped
from torch.utils.data import BatchSampler
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from helpers.tiny import TEXTS, run, write_examples
from skipdecode.data.collator import Collator
from skipdecode.data.tasks import Example
from skipdecode.data.tokenize import train_tokenizer
from skipdecode.errors import UsageError
from skipdecode.training import train as training
from skipdecode.training.config import TrainingPlan
from skipdecode.training.trainer import SkipTrainer

#: 14 rows of several widths: with batches of 4, an epoch has four steps, the last of which is short.
EXAMPLES = [Example(text[: 5 + 2 * i], (text[6 + 2 * i :] or text,)) for i, text in enumerate((TEXTS * 2)[:14])]
EPOCHS, SAVE_STEPS = 3, 3
LAYERS = 3


#: What was said of checkpoints that are passed over.
said: list[str] = []


class KilledError(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing is written after it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with dropout: every random draw of a step shows in the weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer(TEXTS * 20, vocab_size=300)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=LAYERS,
        ffn_dim=16,
        num_attention_heads=2,
        max_position_embeddings=96,
        dropout=0.1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Spy(Collator):
    """Notes the rows of every batch that is made in training."""

    seen: ClassVar[list[list[int]]] = []

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The batch, noted."""
        Spy.seen.append([zlib.crc32(repr((row["prompt_ids"], row["response_ids"])).encode()) for row in rows])
        return super().__call__(rows)


class StopAt(TrainerCallback):
    """Ends the run at a step, before anything of it is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when the step's weights are there and nothing is written."""
        if state.global_step == self.step:
            raise KilledError


def go(
    checkpoint: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: int = 0,
    accumulation: int = 1,
    **options: Any,
) -> torch.Tensor:
    """One run as the command line makes it: resumed if there is something to go on from. Returns the weights."""
    data = output.parent / "data"
    data.mkdir(exist_ok=True)
    for split, examples in (("train", EXAMPLES), ("validation", EXAMPLES[:2])):
        write_examples(data / f"{split}.jsonl", examples)
    values: dict[str, Any] = {
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "num_train_epochs": EPOCHS,
        "save_steps": SAVE_STEPS,
    }
    values |= {"batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation, "eval_steps": 0}
    values |= {"model": checkpoint, "data": data, "output": output, "speedups": (1, 2, 3), "horizon": 4}
    with monkeypatch.context() as patch:
        patch.setattr(training, "Collator", Spy)
        if stop:
            init = SkipTrainer.__init__
            patch.setattr(
                SkipTrainer,
                "__init__",
                lambda self, *a, **k: (init(self, *a, **k), self.add_callback(StopAt(stop)))[0],
            )
        training.train(TrainingPlan(**values | options), say=said.append)
    return torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(output).parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "save_steps"), [(2, 1), (1, 3)])
def test_a_run_killed_at_every_step_sees_the_same_rows_and_ends_with_the_same_weights(
    accumulation: int, save_steps: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: in every epoch, from every step: rows, budgets and dropout are those of the unbroken run, to the bit."""
    options = {"accumulation": accumulation, "save_steps": save_steps}
    Spy.seen = []
    whole = go(checkpoint, tmp_path / "whole", monkeypatch, **options)
    order, pieces = Spy.seen, 4 if accumulation == 1 else 7  # batches of an epoch; its last step is a short one
    assert len(order) == EPOCHS * pieces
    epochs = [sorted(chain(*order[e * pieces : (e + 1) * pieces])) for e in range(EPOCHS)]
    assert epochs[0] == epochs[1] == epochs[2]
    for stop in range(1, EPOCHS * 4 + 1):
        Spy.seen = []
        with pytest.raises(KilledError):
            go(checkpoint, tmp_path / "killed", monkeypatch, stop=stop, **options)
        # The run before was killed a step earlier: this one went on from what that one had saved.
        epoch, step = divmod(max(0, stop - 2) // save_steps * save_steps, 4)
        start = epoch * pieces + step * accumulation
        assert Spy.seen == order[start : start + len(Spy.seen)], f"other rows before step {stop}"
    Spy.seen = []
    resumed = go(checkpoint, tmp_path / "killed", monkeypatch, **options)
    assert Spy.seen == order[len(order) - len(Spy.seen) :]
    assert torch.equal(resumed, whole)


def test_a_finished_run_is_not_trained_further(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command once more changes nothing, where transformers takes a step past the last; fewer are refused."""
    options: dict[str, Any] = {"max_steps": 6, "lr_scheduler_type": "constant"}
    first = go(checkpoint, tmp_path / "run", monkeypatch, **options)
    assert torch.equal(go(checkpoint, tmp_path / "run", monkeypatch, **options), first)
    with pytest.raises(UsageError, match="step 6, past the 5"):
        go(checkpoint, tmp_path / "run", monkeypatch, **options | {"max_steps": 5})


# peft 0.21 still asks transformers for a name it deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_resume_too(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: killed in the second epoch, the merged weights are those of the unbroken run."""
    options = {"lora_rank": 2, "max_steps": 7}
    whole = go(checkpoint, tmp_path / "whole", monkeypatch, **options)
    with pytest.raises(KilledError):
        go(checkpoint, tmp_path / "killed", monkeypatch, stop=7, **options)
    damage(tmp_path / "killed" / "checkpoint-6" / "adapter_model.safetensors", "flip")
    assert torch.equal(go(checkpoint, tmp_path / "killed", monkeypatch, **options), whole)


def test_evaluating_changes_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: how often a run is evaluated is not part of its record, so that its weights must not show it."""
    plain = go(checkpoint, tmp_path / "plain", monkeypatch, max_steps=5)
    seen = go(checkpoint, tmp_path / "seen", monkeypatch, max_steps=5, eval_steps=2)
    assert torch.equal(seen, plain)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    group=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1000),
    skipped=st.integers(0, 60),
    processes=st.integers(1, 3),
)
def test_the_order_of_rows_is_a_function_of_seed_and_epoch(
    lengths: list[int], group: int, seed: int, epoch: int, skipped: int, processes: int
) -> None:
    """F1: all rows once, whatever was drawn before; cut anywhere, the rest is the rest, in each process."""
    now = [epoch]
    sampler = LengthGrouped(lengths, group, seed, lambda: now[0])
    torch.manual_seed(skipped)
    order = list(sampler)
    assert sorted(order) == list(range(len(lengths)))
    torch.manual_seed(skipped + 1)
    before = torch.get_rng_state()
    assert list(sampler) == order
    assert torch.equal(torch.get_rng_state(), before)
    everyone: list[int] = []
    for process in range(processes):
        batches = BatchSamplerShard(BatchSampler(sampler, group, drop_last=False), processes, process)
        whole = list(batches)
        done = skipped % (len(whole) + 1)
        assert list(SkipBatchSampler(batches, done)) == whole[done:]
        everyone += chain(*whole)
    assert set(everyone) == set(range(len(lengths)))
    now[0] += 1
    if len(lengths) > 20:
        assert list(sampler) != order


def test_rows_of_like_length_stand_side_by_side() -> None:
    """Padding over all batches is no more than under transformers' own sampler."""
    lengths = torch.randint(1, 200, (400,)).tolist()
    padding = []
    for sampler in (LengthGrouped(lengths, 8, 0, lambda: 0), LengthGroupedSampler(8, lengths=lengths)):
        batches = list(BatchSampler(sampler, 8, drop_last=False))
        padding.append(sum(max(lengths[i] for i in batch) * len(batch) for batch in batches) - sum(lengths))
    assert padding[0] <= 1.1 * padding[1]


def damage(path: Path, how: str) -> None:
    """Do to a file what disks and kills do."""
    data = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "flip":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    else:
        path.write_bytes(data[: len(data) // 2 if how == "cut" else 0])


@pytest.mark.slow
def test_a_checkpoint_of_which_anything_is_missing_or_damaged_is_passed_over(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12: each of its files deleted, cut, emptied, with a bit flipped: the one before is taken, and that is said."""
    whole = go(checkpoint, tmp_path / "whole", monkeypatch, max_steps=7)
    with pytest.raises(KilledError):
        go(checkpoint, tmp_path / "killed", monkeypatch, stop=7, max_steps=7)
    folder = tmp_path / "killed"
    files = sorted(path.name for path in (folder / "checkpoint-6").iterdir())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= set(files)
    for name in files:
        for how in ("delete", "cut", "empty", "flip"):
            if (name, how) == (SEAL, "flip"):  # of the run's settings: another run
                continue
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            damage(copy / "checkpoint-6" / name, how)
            lines: list[str] = []
            assert RunFolder(copy).newest({"seed": 0}, lines.append) == copy / "checkpoint-3", (name, how)
            if (
                name != SEAL
            ):  # without a seal, or with a false one, it is no checkpoint, or others of its files are named
                assert len(lines) == 1
                assert str(copy / "checkpoint-6") in lines[0]
                assert name in lines[0]
            if name == "optimizer.pt":  # all go the same way from here
                assert torch.equal(go(checkpoint, copy, monkeypatch, max_steps=7), whole)
                assert not list(copy.glob("checkpoint-3"))
            shutil.rmtree(copy)
    damage(folder / "checkpoint-6" / "scheduler.pt", "delete")
    damage(folder / "checkpoint-3" / "rng_state.pth", "flip")
    said.clear()
    assert torch.equal(go(checkpoint, folder, monkeypatch, max_steps=7), whole)
    assert len([line for line in said if "is not whole" in line]) == 2


def model_in(folder: Path) -> tuple[str, int]:
    """What decides what loads from a folder."""
    return (folder / "config.json").read_text(), zlib.crc32((folder / "model.safetensors").read_bytes())


@pytest.mark.slow
def test_a_run_killed_between_any_two_writes_goes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12, F8: dead at each rename, each file that torch or safetensors write and each removal: the same weights.

    And until the last one, what lies in OUTPUT is the old model, or nothing that loads.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what a process wrote outlives it
    old = tmp_path / "old"
    first = go(checkpoint, old, monkeypatch, max_steps=1)
    (old / "pytorch_model.bin").write_bytes(b"an older model's weights")
    shutil.rmtree(old / "checkpoint-1")
    options = {"max_steps": 3, "save_steps": 1}
    calls: list[str] = []

    def watch(patch: pytest.MonkeyPatch, fatal: int) -> None:
        def deadly(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                calls.append(f"{name} {[a for a in args if isinstance(a, str | Path)]}")
                if len(calls) > fatal >= 0:  # the dead clean up nothing
                    raise KilledError
                return function(*args, **kwargs)

            return called

        for module, name in (
            (os, "replace"),
            (torch, "save"),
            (transformers.modeling_utils, "safe_save_file"),
            (shutil, "rmtree"),
            (Path, "unlink"),
            (transformers.TrainerState, "save_to_json"),
        ):
            patch.setattr(module, name, deadly(f"{module.__name__}.{name}", getattr(module, name)))

    with monkeypatch.context() as patch:
        watch(patch, fatal=-1)
        shutil.copytree(old, tmp_path / "whole")
        whole = go(checkpoint, tmp_path / "whole", monkeypatch, **options)
    assert not torch.equal(first, whole)
    models = [model_in(old), model_in(tmp_path / "whole")]
    assert len(calls) > 40
    kinds = [re.sub(r"0x\w+|\d+", "", call) for call in calls]
    points = sorted({kinds.index(kind) for kind in kinds} | {len(kinds) - 1 - kinds[::-1].index(k) for k in kinds})
    for fatal in points:
        folder = tmp_path / "killed"
        shutil.copytree(old, folder)
        calls.clear()
        with monkeypatch.context() as patch:
            watch(patch, fatal)
            with pytest.raises(KilledError):
                go(checkpoint, folder, monkeypatch, **options)
        if (folder / "config.json").exists():
            assert model_in(folder) in models, f"a mixture after write {fatal}"
        assert torch.equal(go(checkpoint, folder, monkeypatch, **options), whole), f"killed at write {fatal}"
        assert model_in(folder) == models[1]
        names = {path.name for path in folder.iterdir() if not path.name.endswith(".tmp")}
        assert names == {path.name for path in (tmp_path / "whole").iterdir()}, f"left behind after write {fatal}"
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_run_killed_by_the_system_goes_on(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1, in a process of its own, by SIGKILL in the second epoch; its lock goes with it."""
    child = os.fork()
    if not child:

        def die(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.step:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            monkeypatch.setattr(StopAt, "on_step_end", die)
            go(checkpoint, tmp_path / "killed", monkeypatch, stop=8)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoint-6").is_dir()
    assert torch.equal(
        go(checkpoint, tmp_path / "killed", monkeypatch), go(checkpoint, tmp_path / "whole", monkeypatch)
    )


def test_nothing_is_said_of_the_second_name_of_a_tied_weight(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On resuming, transformers warns of a head that no checkpoint holds; of other missing keys it still does."""
    lines: list[str] = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", lambda line, *_: lines.append(line))
    for steps in (1, 2):
        go(checkpoint, tmp_path / "run", monkeypatch, max_steps=steps, save_steps=1)
    assert not [line for line in lines if "missing keys" in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_under_way(
    number: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N5: whatever --save-steps is. Whoever handled the signal before then gets it, and the run goes on from there."""
    options = {"save_steps": 100, "max_steps": 7}
    whole = go(checkpoint, tmp_path / "whole", monkeypatch, **options)
    taken: list[int] = []
    before = signal.signal(number, lambda number, _: taken.append(number))
    seed = StepSeed.on_step_begin

    def signalled(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seed(self, args, state, control, **kwargs)
        if state.global_step == 4:
            signal.raise_signal(number)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(StepSeed, "on_step_begin", signalled)
            with pytest.raises(KeyboardInterrupt):
                go(checkpoint, tmp_path / "stopped", patch, **options)
    finally:
        signal.signal(number, before)
    assert taken == [number]
    assert not (tmp_path / "stopped" / "config.json").exists()
    assert [path.name for path in RunFolder(tmp_path / "stopped").checkpoints()] == ["checkpoint-5"]
    assert torch.equal(go(checkpoint, tmp_path / "stopped", monkeypatch, **options), whole)


def test_a_resumed_run_saves_and_evaluates_as_often_as_it_says(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as often as the run before it, which its checkpoint tells; the weights are the same."""
    whole = go(checkpoint, tmp_path / "whole", monkeypatch, save_steps=4, eval_steps=0, max_steps=9)
    with pytest.raises(KilledError):
        go(checkpoint, tmp_path / "out", monkeypatch, 5, save_steps=4, eval_steps=0, max_steps=9)
    resumed = go(checkpoint, tmp_path / "out", monkeypatch, save_steps=3, eval_steps=2, max_steps=9)
    assert [path.name for path in RunFolder(tmp_path / "out").checkpoints()] == ["checkpoint-6", "checkpoint-9"]
    assert torch.equal(resumed, whole)


def test_budgets_in_another_order_are_another_run(shallow_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Which budget a step draws depends on their order: weights would change places."""
    common: tuple[object, ...] = (
        "train",
        shallow_checkpoint,
        "--data",
        data / "train.jsonl",
        "--output",
        tmp_path / "out",
        "--horizon",
        4,
    )
    common += ("--weights", "3,1", "--max-steps", 1, "--save-steps", 1, "--batch-size", 4)
    assert run(*common, "--speedups", "1,2").returncode == 0
    other = run(*common, "--speedups", "2,1")
    assert other.returncode == 2
    assert "another budgets" in other.stderr


def test_a_pruned_models_layers_are_those_of_its_run(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Other layers, asked for or left to the default, have the same shapes: their weights would change places."""
    common: tuple[Any, ...] = ("train", checkpoint, "--data", data / "train.jsonl", "--output", tmp_path / "out")
    common += ("--method", "static")
    common += ("--speedup", 2, "--max-steps", 1, "--save-steps", 1, "--batch-size", 4)
    assert run(*common, "--warmup-layers", 2).returncode == 0
    other = run(*common)
    assert other.returncode == 2
    assert "another layers" in other.stderr


def test_a_peft_adapter_of_the_users_is_not_removed(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Where a run of ours would put, and replace, its own."""
    (folder := tmp_path / "out" / "adapter").mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"mine")
    done = run("train", checkpoint, "--data", data / "train.jsonl", "--output", tmp_path / "out", "--max-steps", 1)
    assert done.returncode == 2
    assert "was written by no training run" in done.stderr
    assert (folder / "adapter_model.safetensors").read_bytes() == b"mine"


# peft 0.21 still asks transformers for a name it deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_new_model_leaves_the_users_adapter_beside_it(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """LoRA's weights of the run before go, another adapter in the same folder stays."""
    common: tuple[Any, ...] = ("train", checkpoint, "--data", data / "train.jsonl", "--output", tmp_path / "out")
    common += ("--speedup", 2)
    common += ("--batch-size", 4)
    assert run(*common, "--max-steps", 1, "--lora-rank", 2).returncode == 0
    folder = tmp_path / "out" / "adapter"
    assert (folder / "adapter_model.safetensors").exists()
    (folder / "custom_generate").mkdir()
    (folder / "adapter.safetensors").write_bytes(b"mine")
    done = run(*common, "--max-steps", 1, "--no-resume")
    assert done.returncode == 0, done.stderr
    assert not [*folder.glob("adapter_*")]
    assert (folder / "adapter.safetensors").read_bytes() == b"mine"
