"""A model learns to skip from texts of its own: an adapter in a folder, and the model stays as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from skipdecode.generation.engine import Transformers
from skipdecode.training.learner import AdapterLearner
from transformers import AutoTokenizer, LlamaConfig, TrainingArguments

from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode import detach, load
from skipdecode.data import chat
from skipdecode.data.collator import batches_of, encoded
from skipdecode.data.tasks import Example, get_task
from skipdecode.errors import DataError, FileError, ModelError, ScheduleError, UsageError
from skipdecode.generation.job import GenerationJob
from skipdecode.loading.load import read_config
from skipdecode.model.adapter import WEIGHTS, Adapter, read_about, read_schedules
from skipdecode.model.attach import attach
from skipdecode.model.config import CONFIG_KEY, set_entry, to_config_entry
from skipdecode.model.inspect import gates_of, text_config
from skipdecode.schedule import Schedule
from skipdecode.serving import server
from skipdecode.serving.settings import Serving
from skipdecode.training import distill as adapting
from skipdecode.training import self_prompts as own_prompts
from skipdecode.training import train as training
from skipdecode.training.config import TrainingPlan
from skipdecode.training.self_generated import SAMPLED, ends_in_loop, hold_out, own_texts
from skipdecode.training.trainer import AdapterTrainer

OWN = [
    "--own-texts",
    24,
    "--max-new-tokens",
    10,
    "--speedups",
    "2,4",
    "--max-steps",
    4,
    "--batch-size",
    4,
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of prompts without responses."""
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", ({"prompt": text} for text in TEXTS))


@pytest.fixture(scope="module")
def trained(checkpoint: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for 2x and 4x. Read it, or copy it to change it."""
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    done = run("train", checkpoint, *OWN, "--prompts", prompts, "--save-steps", 2, "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_adapter_serves_every_verb(trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """As MODEL or beside it, the same texts; ``check`` holds; full depth writes what the stock model writes."""
    job = ["--input", prompts, "--max-new-tokens", 6]
    named = run("generate", trained, *job, "--speedup", 2)
    assert named.returncode == 0, named.stderr
    assert "not trained" not in named.stderr
    assert run("generate", checkpoint, "--adapter", trained, *job, "--speedup", 2).stdout == named.stdout
    stock = run("generate", checkpoint, *job, "--full").stdout
    assert run("generate", trained, *job, "--full").stdout == stock != named.stdout
    done = run("check", trained, "--speedup", 4)
    assert done.returncode == 0, done.stdout
    assert "FAILS" not in done.stdout
    assert run("schedule", trained, "--speedup", 4).returncode == 0
    bad = run("generate", trained, *job, "--speedup", 1.2)
    assert bad.returncode == 2
    assert "take one of its speed-ups (2, 4)" in bad.stderr


def test_what_was_loaded_is_the_adapter(trained: Path, checkpoint: Path) -> None:
    """Its weights are those of the folder; the model's are those of the checkpoint."""
    model, _ = load(str(trained), dtype="float32")
    stock, _ = load(str(checkpoint), dtype="float32")
    assert all(map(torch.equal, model.state_dict().values(), stock.state_dict().values()))
    weights = load_file(trained / WEIGHTS)
    held = gates_of(model).adapter.state_dict()
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], weights[name]) for name in weights)
    assert getattr(detach(model).config, CONFIG_KEY, None) is None


@pytest.mark.parametrize("how", [{"dtype": "float16"}, {"prepack": True}, {"offload": "disk"}], ids=str)
def test_weights_that_are_held_otherwise_are_compared_too(
    trained: Path, checkpoint: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    """In another dtype or layout, or not in memory: the adapter's model is taken, and one with a changed matrix not."""
    model, _ = load(str(trained), **how)
    assert gates_of(model).adapter is not None
    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if name.endswith("fc1.weight"))
    save_file(weights | {name: 1.1 * weights[name]}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="trained on another model"):
        load(str(other), adapter=trained, **how)


def test_a_model_that_cannot_be_compared_is_refused(trained: Path, checkpoint: Path) -> None:
    """In float16, say, without a look at its files."""
    model, _ = load(str(checkpoint), dtype="float16")
    with pytest.raises(ModelError, match="cannot be told"):
        attach(model, adapter=trained)


def test_own_texts_need_one_process(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several would write one file; once it is there, they read it."""
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    plan = TrainingPlan(model=str(checkpoint), own_texts=20, prompts=str(prompts), output=str(tmp_path))
    with pytest.raises(UsageError, match="one process writes own texts"):
        training.train(plan)


def test_the_depth_is_constant_unless_asked_otherwise(trained: Path) -> None:
    """And the layers of a speed-up are among those of the slower one: there is one order."""
    two, four = read_schedules(trained).values()
    assert (two.distinct_depths, four.distinct_depths) == ((4,), (2,))
    assert two.ranking == four.ranking
    options: dict[str, Any] = {"model": "demo", "own_texts": 20, "speedups": (1.5, 2)}
    config = LlamaConfig(num_hidden_layers=30)
    for given in ({}, {"warmup_layers": 1}, {"decay": "linear"}, {"order": "even"}):
        asked = {"decay": "constant", "warmup": 5} | given
        asked["warmup"] = asked.pop("warmup_layers", asked["warmup"])
        if given.get("order") == "even":
            del asked["warmup"]
        assert TrainingPlan(**options, **given).style_for(config) == asked


def test_a_speed_that_the_adapter_did_not_learn_is_refused_at_once(
    trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are loaded; ``attach`` leaves the model as it was."""
    model, _ = load(str(checkpoint), dtype="float32")
    with pytest.raises(ScheduleError, match="was not trained to skip"):
        attach(model, adapter=trained, speedup=1.2)
    assert getattr(model.config, CONFIG_KEY, None) is None
    assert gates_of(model).adapter is None
    Schedule.full(8).flat(7).save(other := tmp_path / "other.json")
    for verb in ("generation.engine", "evaluation.evaluate", "evaluation.check", "weights.loading"):
        monkeypatch.setattr(f"skipdecode.{verb}.load", lambda *_, **__: pytest.fail("loaded"))
    for words in (
        ["generate", trained, "--input", prompts, "--speedup", 1.2],
        ["check", trained, "--speedup", 1.2],
        ["demo", trained, "--speedups", "1,1.2"],
        ["generate", trained, "--input", prompts, "--speedup", 2, "--prompt-layers", "max"],
        ["evaluate", trained, "--data", prompts, "--speedups", "1.2,2", "--output", tmp_path / "table"],
        ["evaluate", trained, "--data", prompts, "--schedule", other, "--output", tmp_path / "table"],
        ["evaluate", trained, "--data", prompts, "--methods", "skipdecode,unified", "--output", tmp_path / "table"],
    ):
        done = run(*words)
        assert done.returncode == 2
        assert "was not trained " in done.stderr


def test_an_evaluation_is_of_the_speeds_that_the_adapter_learnt(trained: Path, prompts: Path, tmp_path: Path) -> None:
    """Unless it is told which."""
    done = run(
        "evaluate", trained, "--data", prompts, "--max-new-tokens", 4, "--repeats", 1, "--output", tmp_path / "t"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "t" / "table.json").read_text())["rows"]
    assert [row["target"] for row in rows] == [1, 2, 4]


def test_a_server_takes_it(trained: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In MODEL's place: its model is served, at its speeds, and at no other that would run layers it does not know."""
    monkeypatch.setattr(server, "require_vllm", lambda: None)
    command, _ = server.server_command(str(trained))
    assert command[command.index("--model") + 1] == str(checkpoint)
    options = json.loads(command[command.index("--additional-config") + 1])[CONFIG_KEY]
    assert server.server_command(str(checkpoint), {"adapter": str(trained)})[0][1:5] == command[1:5]
    serving = Serving(read_config(str(checkpoint)), options)
    assert serving.schedules == read_schedules(trained)
    with_full = Serving(read_config(str(checkpoint)), options | {"speedups": [1, 2]})
    assert with_full.schedules[1.0] == Schedule.full(8)
    assert serving.untrained is None
    with pytest.raises(ScheduleError, match="was not trained to skip"):
        Serving(read_config(str(checkpoint)), options | {"speedups": [1.2]})
    with pytest.raises(FileError, match="no adapter"):
        Serving(read_config(str(checkpoint)), {"adapter": str(checkpoint)})


def test_training_comes_nearer_to_full_depth(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """On texts that it did not learn from, if it begins with maps that do nothing."""
    model, tokenizer = load(str(checkpoint), dtype="float32")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)  # else layers, and what they change, are next to nothing
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    options = ["--own-texts", 80, "--max-new-tokens", 16, "--speedup", 4, "--batch-size", 8]
    options += ["--max-steps", 40, "--eval-steps", 20, "--learning-rate", 5e-3, "--prompts", prompts]
    losses: list[float] = []
    evaluate, train = AdapterTrainer.evaluate, AdapterTrainer.train

    def noted(self: Any, *given: Any, **named: Any) -> dict[str, float]:
        found = evaluate(self, *given, **named)
        losses.append(found["eval_4x_loss"])
        return found

    def after_evaluating(self: Any, **named: Any) -> Any:
        self.evaluate()
        return train(self, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapting, "fit_stand_ins", lambda adapter, passes: None)
        patch.setattr(AdapterTrainer, "evaluate", noted)
        patch.setattr(AdapterTrainer, "train", after_evaluating)
        done = run("train", tmp_path / "model", *options, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert losses[-1] < 0.9 * losses[0]


def test_speeds_learn_from_one_full_pass_as_from_their_own(checkpoint: Path) -> None:
    """Losses and gradients of each schedule, whatever others learnt from the same full pass before."""
    model, tokenizer = load(str(checkpoint), dtype="float32")
    schedules = {2.0: Schedule(8, 5, 3, horizon=4), 4.0: Schedule(8, 2, 2, horizon=1, decay="constant")}
    adapter = Adapter(text_config(model.config).hidden_size, 4, schedules)
    bottleneck: Any = adapter.bottlenecks["7"]
    torch.nn.init.normal_(bottleneck.up, generator=torch.Generator().manual_seed(0))
    learner = AdapterLearner(attach(model, adapter=adapter), adapter).train()
    examples = [Example(TEXTS[i], (TEXTS[i + 1],)) for i in range(3)]
    (batch,) = batches_of(examples, tokenizer, 3)
    shared = learner.full_depth(batch)
    results = []
    for again in (False, True):
        for schedule in schedules.values():
            adapter.zero_grad()
            loss = learner(learner.full_depth(batch) if again else shared, schedule)
            loss.backward()
            results.append([loss, *(p.grad for p in adapter.parameters() if p.grad is not None)])
    assert len(results[0]) > len(results[1]) > 1
    for together, alone in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, together, alone))


def test_the_whole_time_is_told_before_anything_long(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """Before the first text is written; not where the texts are there. It leaves nothing in the model."""
    words = ["train", checkpoint, "--own-texts", 20, "--max-new-tokens", 6, "--max-steps", 2, "--eval-steps", 0]
    words += ["--prompts", prompts, "--output", tmp_path / "out"]
    first = run(*words)
    assert first.returncode == 0, first.stderr
    assert "for 20 texts" in (told := first.stderr[: first.stderr.index("own texts:")])
    assert "for 2 steps" in told
    again = run(*words, "--no-resume")
    assert again.returncode == 0, again.stderr
    assert "this takes about" not in again.stderr
    weights = [load_file(tmp_path / "out" / WEIGHTS)]
    assert run(*words[:-1], tmp_path / "other", "--max-steps", 2).returncode == 0
    weights.append(load_file(tmp_path / "other" / WEIGHTS))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_own_texts_are_as_sure_as_asked(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """Almost without temperature, they are the greedy ones, each once: nothing is learnt from a text twice."""
    options = ["--own-texts", 20, "--max-new-tokens", 6, "--max-steps", 1, "--eval-steps", 0]
    done = run("train", checkpoint, *options, "--prompts", prompts, "--temperature", 1e-6, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "own_texts.jsonl").read_text().splitlines()]
    greedy = run("generate", checkpoint, "--input", prompts, "--max-new-tokens", 6, "--full").stdout.splitlines()
    assert {row["response"].strip() for row in rows} <= {json.loads(line)["text"] for line in greedy}
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert f"{20 - len(rows)} repeated" in done.stderr
    bad = run("train", checkpoint, *options, "--temperature", 0, "--output", tmp_path / "bad")
    assert bad.returncode == 2
    assert "above 0" in bad.stderr


@pytest.mark.parametrize(("given", "temperature"), [(True, 0.5), (False, 1)])
def test_own_texts_are_surer_where_prompts_differ(
    checkpoint: Path, prompts: Path, tmp_path: Path, given: bool, temperature: float
) -> None:
    """By default; from the begin-of-text token alone they are as the model's own distribution has them."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(model)
    words = ["train", model, "--own-texts", 20, "--max-new-tokens", 6, "--max-steps", 1, "--eval-steps", 0]
    words += ["--prompts", prompts] if given else []
    texts = []
    for name, options in (("default", []), ("asked", ["--temperature", temperature])):
        done = run(*words, *options, "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
        texts.append((tmp_path / name / "own_texts.jsonl").read_bytes())
    assert texts[0] == texts[1]


def test_where_no_text_is_left_the_reason_is_told(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Each time: nothing is kept of them."""
    monkeypatch.setattr("skipdecode.training.self_generated.ends_in_loop", lambda text: True)
    job = GenerationJob(str(checkpoint), batch_size=4, options=SAMPLED | {"max_new_tokens": 6}, seed=0)
    for _ in range(2):
        with pytest.raises(DataError, match=r"no text is left to learn from \(.*4 looping"):
            own_texts(job, TEXTS[:4], 4, tmp_path / "texts.jsonl")
    (tmp_path / "mine.json").write_text("[1]")
    with pytest.raises(UsageError, match="was not written by skipdecode"):
        own_texts(job, TEXTS[:4], 4, tmp_path / "mine.jsonl")


class Killed(BaseException):
    """What nothing catches."""


def test_a_killed_run_ends_with_the_same_adapter(
    trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from its texts and its last checkpoint; texts of other prompts are refused."""
    arguments = ["train", checkpoint, *OWN, "--prompts", prompts, "--save-steps", 2, "--output", tmp_path / "again"]
    step = AdapterTrainer.training_step

    def killed(self: Any, *given: Any, **options: Any) -> Any:
        if self.state.global_step == 3:
            raise Killed
        return step(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(AdapterTrainer, "training_step", killed)
        with pytest.raises(Killed):
            run(*arguments)
    texts = (tmp_path / "again" / "own_texts.jsonl").read_bytes()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-2" in done.stderr
    assert (tmp_path / "again" / "own_texts.jsonl").read_bytes() == texts
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    other = run(*arguments[:2], *OWN, "--seed", 5, "--prompts", prompts, "--output", tmp_path / "again")
    assert other.returncode == 2
    assert "other prompts or options" in other.stderr
    (tmp_path / "again" / "own_texts.jsonl").write_bytes(texts[: len(texts) // 2])
    cut = run(*arguments)
    assert cut.returncode == 2
    assert "own_texts.jsonl has changed" in cut.stderr
    (tmp_path / "again" / "own_texts.jsonl").write_bytes(texts[:20] + bytes([texts[20] ^ 1]) + texts[21:])
    damaged = run(*arguments)
    assert damaged.returncode == 2
    assert "own_texts.jsonl has changed" in damaged.stderr


def test_texts_are_learnt_as_they_were_written(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing between a prompt and its text, and no end where a text was cut off; read from the file too."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    job = GenerationJob(str(checkpoint), options=SAMPLED | {"temperature": 1.0, "max_new_tokens": 12}, seed=0)
    texts = own_texts(job, TEXTS[:8], 48, tmp_path / "texts.jsonl")
    assert own_texts(job, TEXTS[:8], 48, tmp_path / "texts.jsonl") == texts
    assert {each.cut for each in texts} == {False, True}
    for each, row in zip(texts, encoded(texts, tokenizer, as_written=True), strict=True):
        ends = row["response_ids"][-1:] == [tokenizer.eos_token_id]
        assert ends != each.cut
        ids = [*row["prompt_ids"], *row["response_ids"][: -1 if ends else None]]
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"{each.prompt}{each.references[0]}"
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    read = get_task("jsonl").examples([("here", line) for line in lines], "train")
    assert [each.cut for each in read] == [each.cut for each in texts]
    held = get_task("jsonl").examples([("here", line) for line in lines], "validation")
    assert {each.prompt: each.cut for each in held} == {each.prompt: each.cut for each in reversed(texts)}


@pytest.mark.parametrize("killed", ["write", "choose"])
def test_own_texts_that_a_killed_run_wrote_are_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """Killed between two batches, or before it chose from them: none is written twice. Other batches are refused."""
    written: list[int] = []

    def wrote(cost: Any) -> None:
        written.append(cost.rows)
        if killed == "write" and len(written) == 2:
            raise Killed

    def texts(size: int, **more: Any) -> list[Example]:
        options = SAMPLED | {"temperature": 1.0, "max_new_tokens": 6}
        return own_texts(
            GenerationJob(str(checkpoint), batch_size=size, options=options, seed=0), TEXTS[:6], 12, **more
        )

    if killed == "choose":
        monkeypatch.setattr(
            "skipdecode.training.self_generated.ends_in_loop", lambda text: (_ for _ in ()).throw(Killed)
        )
    file = tmp_path / "texts.jsonl"
    with pytest.raises(Killed):
        texts(4, file=file, on_batch=wrote)
    monkeypatch.undo()
    before = len(written)
    if killed == "write":
        with pytest.raises(UsageError, match="the batch size counts"):
            texts(6, file=file)
    found = texts(4, file=file, on_batch=wrote)
    assert sum(written[before:]) == (4 if killed == "write" else 0)
    assert found == texts(4, file=file) == texts(4)


@pytest.mark.parametrize("begins", [False, True])
def test_a_chat_model_writes_its_users_messages_too(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Without prompts: each own text answers a message that ended by itself, and none is asked twice.

    A run goes on on another day, though templates may write the date.
    """
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends, begin = tokenizer.eos_token, ("{{ bos_token }}" if begins and tokenizer.bos_token else "")
    tokenizer.chat_template = (
        f"{begin}{{% for m in messages %}}{{{{ m.role }}}} {{{{ m.content }}}}{ends}{{% endfor %}}"
    )
    tokenizer.save_pretrained(model)
    # Random weights seldom end a message: of 200 some do.
    many = [200 if each == 24 else each for each in OWN]
    arguments = ["train", model, *many, "--output", tmp_path / "out"]
    day = iter(("1 May", "2 May"))
    around = chat.around_message
    monkeypatch.setattr(own_prompts, "around_message", lambda its: (f"{next(day)} {around(its)[0]}", around(its)[1]))
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "writes its users' messages too" in done.stderr

    def lines(name: str) -> list[Any]:
        return [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]

    asked = [line["response"] for line in lines("own_prompts.jsonl")]
    assert asked
    assert len(set(asked)) == len(asked)
    prompts = [line["prompt"] for line in lines("own_texts.jsonl")]
    assert all(prompt == [{"role": "user", "content": prompt[0]["content"]}] for prompt in prompts)
    assert {prompt[0]["content"] for prompt in prompts} <= {each.strip() for each in asked}
    assert not any(ends in prompt[0]["content"] for prompt in prompts)
    again = run(*arguments)
    assert again.returncode == 0, again.stderr
    assert prompts
    assert [line["prompt"] for line in lines("own_texts.jsonl")] == prompts


def test_an_adapters_prompts_run_all_layers_whatever_the_model_learnt(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint whose own schedules skip layers in prompts gets an adapter like any other."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    config = read_config(str(model))
    skips = Schedule.for_speedup(2, config.num_hidden_layers, 8, prompt_layers="max", decay="linear")
    set_entry(config, to_config_entry({2.0: skips}))
    config.save_pretrained(model)
    source = write_jsonl(tmp_path / "prompts.jsonl", ({"prompt": text} for text in TEXTS))
    done = run("train", model, *OWN, "--prompts", source, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert {each.prompt_layers for each in read_schedules(tmp_path / "out").values()} == {None}


@pytest.mark.parametrize(("prompts", "each", "most"), [(40, 1, 100), (40, 3, 100), (40, 3, 2), (1, 30, 100), (5, 4, 0)])
def test_no_text_is_learnt_whose_prompt_is_held_out(prompts: int, each: int, most: int) -> None:
    """Texts of one prompt are alike; with fewer than ten prompts only the texts themselves are apart."""
    texts = [Example(f"prompt {i % prompts}", (f"text {i}",)) for i in range(prompts * each)]
    learnt, held = hold_out(texts, most)
    assert not {*learnt} & {*held}
    assert len(held) == min(most, len(texts) // 10)
    if prompts >= 10:
        assert not {text.prompt for text in learnt} & {text.prompt for text in held}
        assert {*learnt} | {*held} >= {text for text in texts if text.prompt not in {each.prompt for each in held}}
    else:
        assert {*learnt, *held} == {*texts}


def test_a_model_in_bfloat16_teaches_an_adapter(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """--bf16: the frozen model computes in bfloat16, the adapter is saved so, and serves the model itself."""
    done = run("train", checkpoint, *OWN, "--bf16", "--prompts", prompts, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    weights = load_file(tmp_path / "out" / "adapter.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    learnt = load_file(max((tmp_path / "out").glob("checkpoint-*")) / "model.safetensors")
    assert {weight.dtype for weight in learnt.values()} == {torch.float32}
    model, _ = load(str(tmp_path / "out"))
    assert next(model.parameters()).dtype == torch.float32


def test_own_texts_train_all_weights_too(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """--no-adapters: the other way, on the same texts."""
    arguments = [*OWN, "--no-adapters"]
    done = run("train", checkpoint, *arguments, "--prompts", prompts, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["skipdecode"]["schedules"].keys() == {"2", "4"}


def test_training_goes_on_from_an_adapter(trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """Its own model's, or that of the model it was fine-tuned from: what it knew of a speed-up is where it begins."""
    still = ["--max-steps", 1, "--learning-rate", 1e-30, "--own-texts", 20, "--max-new-tokens", 6, "--prompts", prompts]
    start = load_file(trained / WEIGHTS)
    done = run("train", trained, *still, "--output", tmp_path / "more")
    assert done.returncode == 0, done.stderr
    assert read_about(tmp_path / "more")["base_model"] == read_about(trained)["base_model"]
    more = load_file(tmp_path / "more" / WEIGHTS)
    assert more.keys() == start.keys()
    assert all(torch.equal(more[name], start[name]) for name in start)

    model, tokenizer = load(str(checkpoint), dtype="float32")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "tuned")
    done = run("train", tmp_path / "tuned", *still, "--adapter", trained, "--speedup", 2, "--output", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert read_schedules(tmp_path / "two") == {2.0: read_schedules(trained)[2.0]}
    two = load_file(tmp_path / "two" / WEIGHTS)
    assert 0 < len(two) < len(start)
    assert all(torch.equal(two[name], start[name]) for name in two)
    assert load(str(tmp_path / "tuned"), adapter=tmp_path / "two")
    with pytest.raises(ModelError, match="another model"):
        load(str(checkpoint), adapter=tmp_path / "two")


def test_an_adapter_that_training_cannot_begin_with_is_refused(trained: Path, tmp_path: Path) -> None:
    """Before a model is loaded, and it stays as it is."""
    before = (trained / WEIGHTS).read_bytes()
    for words, said in (
        ([trained, "--speedup", 3], "has no speed-up 3 to begin with: it has 2, 4"),
        ([trained, "--order", "even"], "brings its layers"),
        ([trained, "--adapter-rank", 8], "brings its layers and its rank"),
        ([trained, "--no-adapters"], "does not go with --no-adapters"),
        ([trained, "--own-texts", 20, "--output", trained], "holds what is to be trained"),
        (["demo", "--own-texts", 20, "--adapter", trained], "for 8 layers of width"),
        (["demo", "--own-texts", 20, "--adapter", tmp_path], "holds no adapter"),
    ):
        done = run("train", *words, *["--output", tmp_path / "out"] * ("--output" not in words))
        assert done.returncode == 2, said
        assert said in done.stderr
    assert (trained / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora_rank": 4}, "--lora-rank goes with --no-adapters"),
        ({"distill_weight": 0.5}, "--distill-weight goes with --no-adapters"),
        ({"gradient_checkpointing": True}, "--gradient-checkpointing goes with --no-adapters"),
        ({"prompts": "x", "data": "y"}, "one of --prompts and --data"),
        ({"own_texts": None, "temperature": 0.7}, "--temperature goes with --own-texts"),
        ({"method": "calm", "adapters": None}, "are for the method skipdecode"),
        ({"prompt_layers": "max"}, "leave the prompt to the full model"),
        ({"speedups": (1, 2)}, "1x is the model itself"),
        ({"own_texts": None, "prompts": "x"}, "--prompts goes with --own-texts"),
        ({"own_texts": None, "engine": "vllm"}, "--engine goes with --own-texts"),
        ({"adam_beta2": 0.98}, "learn with Muon"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(values: dict[str, Any], said: str) -> None:
    """Before anything is loaded."""
    options: dict[str, Any] = {"model": "demo", "own_texts": 20, "adapters": True} | values
    with pytest.raises(UsageError, match=said):
        TrainingPlan(**options)


def test_an_engine_that_refuses_does_so_before_a_model_is_loaded(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM where there is a GPU, say: not after minutes of trying how fast the model is."""

    class Refusing(Transformers):
        def check(self, *_: Any) -> None:
            raise UsageError("not here")

    monkeypatch.setattr(training, "get_engine", lambda name: Refusing())
    monkeypatch.setattr("skipdecode.loading.load.load", lambda *_, **__: pytest.fail("loaded"))
    plan = TrainingPlan(model=str(checkpoint), own_texts=20, prompts=str(prompts), adapters=True, output=str(tmp_path))
    with pytest.raises(UsageError, match="not here"):
        training.train(plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speedups", "1.02,2", "--prompts"], "1.02x of 8 layers is all of them"),
        (["--prompts", "there/is/none.jsonl"], "there is no file there/is/none.jsonl"),
        (["--data", "there/is/none.jsonl"], "there/is/none.jsonl"),
    ],
    ids=["full", "prompts", "data"],
)
def test_what_a_model_cannot_learn_is_told_before_it_is_loaded(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    """A speed-up that rounds to all layers, or prompts or data that are not there."""
    options = [*options, str(prompts)] if options[-1] == "--prompts" else options
    monkeypatch.setattr("skipdecode.loading.load.load", lambda *_, **__: pytest.fail("loaded"))
    done = run("train", checkpoint, "--own-texts", 20, *options, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        ("no no no no no no no no no", True),
        ("It ends well. " * 5, True),
        ("a" * 30, True),
        ("a text that ends", False),
        ("He said: no no no no", False),
        ("", False),
    ],
)
def test_loops_are_known(text: str, looping: bool) -> None:
    """Four times the same, and not of a few characters alone."""
    assert ends_in_loop(text) is looping
