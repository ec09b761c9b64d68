"""Other people's training loops skip layers as decoding does, with one object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoConfig, Trainer, TrainingArguments

import skipdecode
from helpers.families import FAMILIES, FORMS, LAYERS, SCHEDULES, build
from helpers.tiny import EXAMPLES
from skipdecode import Schedule, Skipping, attach, teacher_forced
from skipdecode.errors import CacheError, UsageError
from skipdecode.model.config import config_schedules
from skipdecode.model.inspect import decoder_layers

#: TRL still uses names that transformers has deprecated.
TRL = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
#: Rows of a prompt and a response: uneven, one without a response.
ROWS = ((5, 7), (1, 9), (8, 3), (4, 0))


def batch_of(rows: tuple[tuple[int, int], ...] = ROWS, left: int = 0) -> dict[str, Tensor]:
    """Right-padded rows as a collator makes them, the first ``left`` columns padding too; labels on responses alone."""
    torch.manual_seed(1)
    width = max(map(sum, rows)) + left
    ids = torch.randint(2, 100, (len(rows), width))
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (prompt, response) in enumerate(rows):
        mask[i, left : left + prompt + response] = 1
        labels[i, left + prompt : left + prompt + response] = ids[i, left + prompt : left + prompt + response]
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def alone(model: Any, schedule: Schedule, batch: dict[str, Tensor], row: int) -> tuple[int, int, Tensor]:
    """A row's first column, its prompt's length, and its logits from a pass of its own, without padding."""
    attach(model)
    here = batch["attention_mask"][row].bool()
    ids = batch["input_ids"][row][here][None]
    learned = (batch["labels"][row][here] != -100).nonzero()
    prompt = int(learned[0]) if len(learned) else ids.shape[1]
    with teacher_forced(model, schedule, prompt):
        return int(here.int().argmax()), prompt, model(input_ids=ids, use_cache=False).logits[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_any_layout_skip_what_decoding_would(name: str) -> None:
    """Loss and logits of a padded batch are those of each row alone, in the columns where they were given."""
    model, schedule, batch = build(name), SCHEDULES["permutation"], batch_of(left=3)
    skipping = Skipping(model, speedups={3.0: schedule})
    with torch.no_grad(), skipping.at(3.0):
        output = model(**batch)
    total, count = 0.0, 0
    assert output.logits.shape[:2] == batch["input_ids"].shape
    for row, (prompt, response) in enumerate(ROWS):
        with torch.no_grad():
            start, found, logits = alone(model, schedule, batch, row)
        assert found == prompt
        stop = start + prompt + response
        assert torch.allclose(output.logits[row, start:stop], logits, atol=1e-4)
        labels = batch["labels"][row, start:stop]
        total += float(cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum"))
        count += response
    assert output.loss.item() == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_full_depth_and_passes_outside_steps_are_the_models_own(name: str) -> None:
    """Moving rows changes no loss; without a step, nothing is moved."""
    model, batch = build(name), batch_of()
    stock = model(**batch)
    skipping = Skipping(model, speedups={1.0: Schedule.full(LAYERS), 3.0: SCHEDULES["top"]})
    assert torch.equal(model(**batch).logits, stock.logits)
    with skipping.at(1.0):
        output = model(**batch)
    assert output.loss.item() == pytest.approx(stock.loss.item(), rel=1e-5)
    real = batch["attention_mask"].bool()
    assert torch.allclose(output.logits[real], stock.logits[real], atol=1e-4)


def test_a_loop_of_ones_own_learns_what_the_rows_alone_would() -> None:
    """Gradients of a step are those of the mean loss over the rows, also where layers are computed anew."""
    wanted: dict[str, Tensor] = {}
    for recompute in (None, False, True):
        model, batch = build("llama").train(), batch_of()
        if recompute is None:
            for row, (_, response) in enumerate(ROWS):
                start, _, logits = alone(model, SCHEDULES["top"], batch, row)
                labels = batch["labels"][row, start : start + len(logits)]
                loss = cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
                if response:
                    (loss / sum(each for _, each in ROWS)).backward()
            wanted = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
            continue
        if recompute:
            old = "gradient_checkpointing_enable"  # renamed in transformers 5.23
            (getattr(model, "activation_checkpointing_enable", None) or getattr(model, old))({"use_reentrant": False})
        skipping = Skipping(model, speedups={2.0: SCHEDULES["top"]})
        with skipping.step(0):
            model(**batch).loss.backward()
        assert wanted.keys() == {name for name, weight in model.named_parameters() if weight.grad is not None}
        for name, weight in model.named_parameters():
            assert weight.grad is None or torch.allclose(weight.grad, wanted[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": (1,)}, "a number for each"),
        ({"weights": (0, 0)}, "not all 0"),
        ({"weights": (-1, 2)}, "0 or more"),
        ({"speedups": ()}, "one or more"),
        ({"speedups": (2, 2.0)}, "each once"),
    ],
)
def test_speeds_that_cannot_be_drawn_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Skipping(**{"speedups": (1, 2)} | options)


def test_what_a_row_may_not_hold_is_refused() -> None:
    """Several texts, several responses, no labels, none that counts: each with its reason, before the pass."""
    model, batch = build("llama"), batch_of()
    skipping = Skipping(model, speedups={2.0: SCHEDULES["top"]})

    def refused(error: type[Exception], words: str, **changes: Any) -> None:
        with pytest.raises(error, match=words), skipping.at(2.0):
            model(**batch | changes)

    refused(CacheError, "packed", position_ids=torch.arange(12).expand(4, -1) % 5)
    refused(UsageError, "several places", labels=batch["labels"].clone().index_fill(1, torch.tensor([8]), -100))
    refused(UsageError, "labels", labels=None)
    refused(UsageError, "nothing to learn", labels=torch.full_like(batch["labels"], -100))
    refused(UsageError, "logits_to_keep", logits_to_keep=3)
    refused(UsageError, "output_hidden_states", output_hidden_states=True)
    for given, words in (
        ({"weights": (1,)}, "each speed"),
        ({"weights": (0, 0)}, "not all 0"),
        ({"speedups": ()}, "one or"),
    ):
        with pytest.raises(UsageError, match=words):
            Skipping(**{"speedups": (1, 2)} | given)
    with pytest.raises(UsageError, match="give one of 2"), skipping.at(3.0):
        pass
    with pytest.raises(UsageError, match="have their own order"):
        Skipping(speedups={2.0: SCHEDULES["top"]}, order="bottom")


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model, batch = build("llama"), batch_of()
    skipping = Skipping(model, speedups={2.0: SCHEDULES["top"]})
    stock = model(**batch).logits
    broken = decoder_layers(model)[5].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), skipping.at(2.0):
        model(**batch)
    broken.remove()
    assert torch.equal(model(**batch).logits, stock)


@pytest.mark.parametrize("left", [0, 2])
def test_a_text_without_a_prompt_begins_with_all_layers(left: int) -> None:
    """Labels on all of a row, its padding too: its first token, which no logits predict, is its prompt."""
    model, batch = build("llama"), batch_of(((0, 7), (0, 4)), left)
    skipping = Skipping(model, speedups={2.0: SCHEDULES["top"]})
    with torch.no_grad(), skipping.at(2.0):
        output = model(**batch | {"labels": batch["input_ids"]})
    for row, size in enumerate((7, 4)):
        ids = batch["input_ids"][row : row + 1, left : left + size]
        with torch.no_grad(), teacher_forced(model, SCHEDULES["top"], 1):
            expected = model(input_ids=ids, use_cache=False).logits[0]
        assert torch.allclose(output.logits[row, left : left + size], expected, atol=1e-4)


def rows_of(tokenizer: Any) -> list[dict[str, list[int]]]:
    """The tests' texts, tokenized; labels on their responses."""
    found = []
    for example in EXAMPLES:
        prompt, response = tokenizer(example.prompt).input_ids, tokenizer(example.references[0]).input_ids
        found.append({"input_ids": prompt + response, "labels": [-100] * len(prompt) + response})
    return found


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Right padding, as most collators do it."""
    width = max(len(row["input_ids"]) for row in rows)
    return {
        "input_ids": torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]),
        "attention_mask": torch.tensor([[int(i < len(row["labels"])) for i in range(width)] for row in rows]),
        "labels": torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows]),
    }


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """Three steps on the CPU."""
    more = {"max_steps": 3, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "save_steps": 3}
    return {"output_dir": str(folder), "learning_rate": 1e-2, "disable_tqdm": True, **more, **options}


def test_a_trainers_steps_are_those_of_a_loop(checkpoint: Path, tmp_path: Path) -> None:
    """transformers' Trainer with the callback, and ten lines with accelerate, end with the same weights and schedules;
    what is saved is evaluated and generated from at each speed-up."""
    ends = []
    for ours in (False, True):
        model, tokenizer = skipdecode.load(str(checkpoint))
        skipping = Skipping(None if ours else model, speedups=(1, 2, 4), decay="linear", horizon=8, seed=5)
        rows: Any = rows_of(tokenizer)
        if ours:
            args = TrainingArguments(
                **arguments(tmp_path / "trainer"),
                lr_scheduler_type="constant",
                max_grad_norm=0,
                train_sampling_strategy="sequential",
            )
            trainer = Trainer(model, args, collate, rows, callbacks=[skipping])
            trainer.train()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2, (0.9, 0.999), 1e-8, 0.0)
            model.train()
            accelerator = Accelerator(cpu=True)
            prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 4, collate_fn=collate))
            for number, batch in zip(range(3), loader, strict=False):
                with skipping.step(number):
                    accelerator.backward(prepared(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        ends.append({name: weight.detach() for name, weight in model.named_parameters()})
        model.save_pretrained(tmp_path / str(ours))
        tokenizer.save_pretrained(tmp_path / str(ours))
        assert config_schedules(AutoConfig.from_pretrained(tmp_path / str(ours))) == skipping.schedules
        assert set(skipping.schedules) == {1.0, 2.0, 4.0}
    stock = dict(skipdecode.load(str(checkpoint))[0].named_parameters())
    assert any(not torch.equal(ends[0][name], weight) for name, weight in stock.items())
    for name, weight in ends[0].items():
        assert torch.allclose(ends[1][name], weight, atol=1e-4), name
    for speedup in (1, 4):
        model, tokenizer = skipdecode.load(str(tmp_path / "True"))
        prompts = [each.prompt for each in EXAMPLES[:4]]
        written = skipdecode.generate(model, tokenizer, prompts, speedup=speedup, max_new_tokens=9)
        assert written.stats.average_depth == pytest.approx(skipping.schedules[speedup].average_depth(8))


@TRL
@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_trls_trainer_skips(checkpoint: Path, tmp_path: Path, lora: bool) -> None:
    """SFTTrainer's loss at each step is that of the rows at the step's speed-up; what it saves works in every verb."""
    trl: Any = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    model, tokenizer = skipdecode.load(str(checkpoint))
    rows = Dataset.from_list([{"prompt": each.prompt, "completion": " " + each.references[0]} for each in EXAMPLES])
    options: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    skipping, seen = Skipping(speedups=(1, 2, 4)), list[Any]()
    args = trl.SFTConfig(**arguments(tmp_path / "sft"), logging_steps=1, bf16=False, max_length=64)

    class Noted(trl.SFTTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *given: Any, **more: Any) -> Any:
            schedule: Any = skipping.current
            batch = {k: v.clone() for k, v in inputs.items() if isinstance(v, Tensor)}
            loss = super().compute_loss(model, inputs, *given, **more)
            wanted, skipping.current = 0.0, None  # what it is compared with is no pass of the step
            for row in range(len(batch["input_ids"])):
                with torch.no_grad():
                    start, _, logits = alone(self.accelerator.unwrap_model(model), schedule, batch, row)
                labels = batch["labels"][row, start : start + len(logits)]
                wanted += float(cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum"))
            skipping.current = schedule
            seen.append((schedule, loss.item(), wanted / int((batch["labels"] != -100).sum())))
            return loss

    trainer = Noted(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[skipping], **options)
    trainer.train()
    assert len(seen) == 3
    for schedule, loss, wanted in seen:
        assert schedule is not None
        assert loss == pytest.approx(wanted, rel=1e-3)
    assert [each[0] for each in seen] == [skipping.drawn(step) for step in range(3)]
    trained = trainer.model.merge_and_unload() if lora else trainer.model
    trained.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model, tokenizer = skipdecode.load(str(tmp_path / "model"))
    written = skipdecode.generate(model, tokenizer, [each.prompt for each in EXAMPLES[:3]], speedup=4, max_new_tokens=6)
    assert written.stats.average_depth == 2


@TRL
@pytest.mark.parametrize("option", ["packing", "padding_free"])
def test_trls_packing_is_refused(tmp_path: Path, option: str) -> None:
    """Before the first step."""
    trl: Any = pytest.importorskip("trl", reason="TRL is not installed")
    args = trl.SFTConfig(**arguments(tmp_path), bf16=False, **{option: True})
    with pytest.raises(UsageError, match="packing=False"):
        Skipping(speedups=(1, 2)).on_train_begin(args, None, None, model=build("llama"))
