"""What lm-evaluation-harness gets is what decoding through a SkipCache computes."""

from __future__ import annotations

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import skipdecode
from helpers.families import LAYERS, SCHEDULES, build
from helpers.tiny import TEXTS, WORDS
from skipdecode import Schedule, ScheduleError, SkipCache, attach
from skipdecode.errors import ModelError

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from skipdecode.evaluation.lm_eval import SkipLM, main
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.model.cache_name import CACHE

LENGTHS = [(9, 1), (5, 16), (2, 7), (12, 1), (1, 20), (5, 3), (9, 12)]  # tokens of context and of continuation
PAIRS = [(" ".join(WORDS[:n]), " " + " ".join(WORDS[n : n + m])) for n, m in [(3, 1), (7, 6), (1, 9), (5, 2)]]
PAIRS += [("", "the cat sat"), ("the dog ", "that sat")]


def wrap(kind: type[HFLM], model: PreTrainedModel, checkpoint: Path, **options: Any) -> Any:
    """A model of 128 tokens; the tokenizer only lends its padding token."""
    return kind(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(checkpoint), **options)


def load(kind: type[HFLM], checkpoint: Path | str, **options: Any) -> Any:
    return kind(pretrained=str(checkpoint), device="cpu", **options)


def score(lm: HFLM, requests: list[Any]) -> list[tuple[float, bool]]:
    return lm._loglikelihood_tokens(requests, disable_tqdm=True)


def tokens(model: PreTrainedModel, schedule: Schedule) -> list[Any]:
    """Requests of random ids, and one that the model itself would write."""
    draw = torch.Generator().manual_seed(3)
    ids = [[torch.randint(2, 128, (n,), generator=draw).tolist() for n in pair] for pair in LENGTHS]
    own = by_hand(attach(model), schedule, ids[0][0], [None] * 10)[2]
    return [(None, context, continuation) for context, continuation in [*ids, (ids[0][0], own)]]


@torch.no_grad()
def by_hand(
    model: PreTrainedModel, schedule: Schedule, context: list[int], continuation: list[Any]
) -> tuple[float, bool, list[int]]:
    """Fed one token a pass through a SkipCache; None stands for the likeliest token."""
    cache, fed, total, text, likeliest = SkipCache(model, schedule), context, 0.0, [], []
    for token in continuation:
        scores = model(torch.tensor([fed]), **{CACHE: cache}).logits[0, -1].log_softmax(-1)
        likeliest.append(int(scores.argmax()))
        text.append(likeliest[-1] if token is None else token)
        total += float(scores[text[-1]])
        fed = text[-1:]
    return total, text == likeliest, text


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def same(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]], tolerance: float = 1e-5) -> None:
    assert [a for a, _ in ours] == pytest.approx([b for b, _ in theirs], rel=tolerance)
    assert [a for _, a in ours] == [b for _, b in theirs]


# --- log-likelihoods


@pytest.mark.parametrize(("name", "batch_size"), [("opt", 1), ("gpt-neo", 4), ("gemma3", 4), ("phi3-sliding", 4)])
def test_full_depth_is_the_stock_backend(name: str, batch_size: int, checkpoint: Path) -> None:
    ours = wrap(SkipLM, build(name), checkpoint, speedup=1, batch_size=batch_size)
    requests = tokens(ours.model, ours.schedule)
    answers = score(ours, requests)
    same(answers, score(wrap(HFLM, build(name), checkpoint, batch_size=batch_size), requests))
    assert answers[-1][1]


@pytest.mark.parametrize(
    ("name", "schedule"), [("opt", "top"), ("gpt2", "permutation"), ("llama", "prompt"), ("phi3-sliding", "top")]
)
def test_a_schedule_is_decoding_token_by_token(name: str, schedule: str, checkpoint: Path) -> None:
    lm = wrap(SkipLM, build(name), checkpoint, schedule=SCHEDULES[schedule], batch_size=4)
    requests = tokens(lm.model, lm.schedule)
    answers = score(lm, requests)
    same(answers, [by_hand(lm.model, lm.schedule, *request[1:])[:2] for request in requests], 1e-4)
    assert answers[-1][1]


def test_texts_and_empty_contexts(checkpoint: Path) -> None:
    requests = instances("loglikelihood", PAIRS)
    ours = load(SkipLM, checkpoint, speedup=1, batch_size=4).loglikelihood(requests, disable_tqdm=True)
    same(ours, load(HFLM, checkpoint, batch_size=4).loglikelihood(requests, disable_tqdm=True))


def test_long_contexts_lose_their_left_end(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    lm = load(SkipLM, checkpoint, speedup=1, max_length=16, batch_size=4)
    stock = load(HFLM, checkpoint, max_length=16, batch_size=4)
    requests = [(None, list(range(5, 5 + n)), list(range(40, 40 + m))) for n, m in [(30, 16), (30, 3), (13, 4), (4, 2)]]
    same(score(lm, requests), score(stock, requests))
    assert "2 contexts were cut" in caplog.text
    with pytest.raises(ValueError, match="continuation of 1 to 16 tokens"):
        score(lm, [(None, [5], list(range(5, 22)))])


def test_rolling_windows(checkpoint: Path) -> None:
    """Two windows and one; the prefix token is the prompt, so everything else is generated."""
    requests = instances("loglikelihood_rolling", [(" ".join(WORDS),), (TEXTS[0],)])
    stock = load(HFLM, checkpoint, max_length=16, batch_size=4).loglikelihood_rolling(requests, disable_tqdm=True)
    ours = load(SkipLM, checkpoint, max_length=16, batch_size=4, speedup=1)
    assert ours.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(stock, rel=1e-5)
    short = load(SkipLM, checkpoint, speedup=3, batch_size=4)
    text = short.tok_encode(TEXTS[0])
    expected = by_hand(short.model, short.schedule, [short.prefix_token_id], text)[0]
    assert short.loglikelihood_rolling(requests, disable_tqdm=True)[1] == pytest.approx(expected, rel=1e-4)


def test_automatic_batches_and_the_cache_of_answers(checkpoint: Path) -> None:
    kept: dict[Any, Any] = {}
    lm = load(SkipLM, checkpoint, speedup=3, batch_size="auto", max_batch_size=4)
    lm.cache_hook.add_partial = lambda kind, texts, answer: kept.update({texts: answer})
    answers = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    same(answers, load(SkipLM, checkpoint, speedup=3).loglikelihood(instances("loglikelihood", PAIRS)))
    assert [kept[pair] for pair in PAIRS] == answers


# --- texts


@pytest.mark.parametrize("options", [{"speedup": 1}, {"schedule": Schedule.for_speedup(4, 8, 11, decay="linear")}])
def test_texts_are_those_of_generate(checkpoint: Path, options: dict[str, Any]) -> None:
    wanted = {"max_gen_toks": 12, "do_sample": False, "until": ["<none>"]}
    requests = instances("generate_until", [(text, wanted) for text in TEXTS[:3]])
    texts = load(SkipLM, checkpoint, batch_size=2, **options).generate_until(requests, disable_tqdm=True)
    model, tokenizer = skipdecode.load(str(checkpoint), device="cpu")
    alike = skipdecode.generate(model, tokenizer, TEXTS[:3], max_new_tokens=12, do_sample=False, **options)
    assert texts == [completion.text for completion in alike.completions]
    stock = load(HFLM, checkpoint, batch_size=2).generate_until(requests, disable_tqdm=True)
    assert (texts == stock) == ("schedule" not in options)


@pytest.mark.parametrize("speedup", [1, 4])
def test_nan_is_no_score_and_no_text(checkpoint: Path, speedup: float) -> None:
    lm = load(SkipLM, checkpoint, speedup=speedup, batch_size=2)
    lm.model.get_output_embeddings().register_forward_hook(lambda *args: args[-1] * math.nan)
    with pytest.raises(ModelError, match="logits are NaN"):
        lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    wanted = {"max_gen_toks": 4, "do_sample": False, "until": ["<none>"]}
    with pytest.raises(ModelError, match="logits are NaN"):
        lm.generate_until(instances("generate_until", [(TEXTS[0], wanted)]), disable_tqdm=True)


# --- the schedule


def test_the_schedule_is_chosen_and_told(checkpoint: Path, tmp_path: Path) -> None:
    schedule = Schedule(LAYERS, 5, 3, horizon=7)
    schedule.save(tmp_path / "schedule.json")
    lm = load(SkipLM, checkpoint, schedule=str(tmp_path / "schedule.json"))
    assert lm.schedule == schedule
    assert lm.get_model_info()["skipdecode_schedule"] == schedule.to_dict()
    assert load(SkipLM, checkpoint).schedule.is_full
    with pytest.raises(ScheduleError, match="for 9 layers, the model has 8"):
        load(SkipLM, checkpoint, schedule=Schedule.full(9))


def test_an_adapter_runs_at_its_speeds(checkpoint: Path, tmp_path: Path) -> None:
    """``pretrained=MODEL,adapter=FOLDER,speedup=2``; or the folder alone, whose slowest speed then runs."""
    model, _ = skipdecode.load(str(checkpoint), device="cpu")
    schedules = {2.0: Schedule(LAYERS, 4, 4, 1), 4.0: Schedule(LAYERS, 2, 2, 1)}
    adapter = Adapter(model.config.hidden_size, 4, schedules)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.3)
    save_adapter(tmp_path / "fast", adapter, model, str(checkpoint))
    requests = instances("loglikelihood", PAIRS)
    both, folder, other = (
        load(SkipLM, name, **options)
        for name, options in (
            (checkpoint, {"adapter": str(tmp_path / "fast"), "speedup": 2}),
            (tmp_path / "fast", {}),
            (checkpoint, {"speedup": 2}),
        )
    )
    assert both.schedule == folder.schedule == schedules[2.0]
    answers = both.loglikelihood(requests, disable_tqdm=True)
    same(answers, folder.loglikelihood(requests, disable_tqdm=True))
    assert answers != other.loglikelihood(requests, disable_tqdm=True)
    ids = tokens(both.model, both.schedule)
    same(score(both, ids), [by_hand(both.model, both.schedule, *request[1:])[:2] for request in ids], 1e-4)
    with pytest.raises(ScheduleError, match="2x and 4x"):
        load(SkipLM, tmp_path / "fast", speedup=3)


# --- from end to end

#: Writes both special tokens itself; what it ends in belongs to the prompt.
TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def chats(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a chat template."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("chats") / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Two tasks over a file: which word follows, and how likely the rest is."""
    rows = [{"prompt": " ".join(t.split()[:3]), "rest": " ".join(t.split()[3:]), "other": "by a house"} for t in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")},
        "test_split": "train",
        "doc_to_text": "{{prompt}}",
    }
    rest: dict[str, Any] = {"task": "rest", "output_type": "loglikelihood", "doc_to_target": " {{rest}}"}
    rest["metric_list"] = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    choice: dict[str, Any] = {"task": "choice", "output_type": "multiple_choice", "doc_to_target": 0}
    choice |= {"doc_to_choice": "{{[rest, other]}}", "metric_list": [{"metric": "acc"}]}
    for name, values in {"rest": rest, "choice": choice}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(base | values), encoding="utf-8")
    return tmp_path


def evaluate(model: str, folder: Path, **arguments: Any) -> tuple[float, float]:
    """Perplexity of the rest, and accuracy of the choice."""
    done = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["rest", "choice"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=4,
        device="cpu",
        apply_chat_template=True,
        bootstrap_iters=0,
        log_samples=False,
    )["results"]
    return done["rest"]["perplexity,none"], done["choice"]["acc,none"]


@pytest.mark.slow
def test_simple_evaluate(chats: Path, task: Path) -> None:
    """At full depth it is the stock backend's score, at a budget another one; with the chat template."""
    stock = evaluate("hf", task, pretrained=str(chats))
    full = evaluate("skipdecode", task, pretrained=str(chats), speedup=1)
    fast = evaluate("skipdecode", task, pretrained=str(chats), speedup=4)
    assert full == pytest.approx(stock, rel=1e-5)
    assert not math.isclose(fast[0], stock[0], rel_tol=1e-3)


@pytest.mark.slow
def test_the_command_line(chats: Path, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the harness's own, `--apply_chat_template` included; the schedule stands beside the results."""
    command = ["harness", "--model", "skipdecode", "--tasks", "rest", "--device", "cpu"]
    command += ["--output_path", str(task / "out"), "--apply_chat_template"]
    command += ["--model_args", f"pretrained={chats},speedup=4", "--include_path", str(task)]
    monkeypatch.setattr(sys, "argv", command)
    # Reading the harness's own thousands of tasks would take most of a minute.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("lm_eval.api.metrics.bootstrap_stderr", lambda *_, **__: 0.0)  # 100,000 samples
    main()
    (report,) = (task / "out").rglob("results_*.json")
    results = json.loads(report.read_text(encoding="utf-8"))
    expected, _ = evaluate("skipdecode", task, pretrained=str(chats), speedup=4)
    assert results["results"]["rest"]["perplexity,none"] == pytest.approx(expected, rel=1e-4)
    assert results["config"]["skipdecode_schedule"]["max_depth"] < LAYERS
    assert results["chat_template"] == TEMPLATE
