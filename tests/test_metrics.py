"""Metrics: sums over rows give what the libraries give for a corpus, and the bootstrap is what it says."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skipdecode.data.metrics import DEFAULT, BertScore, Bleu, Metric, RougeL, bootstrap
from skipdecode.errors import ModelError

WORDS = "The café by the river serves English food . It isn't cheap , but family-friendly ; £20-25 !".split()


def corpus(rows: int, seed: int, words: int = 12) -> list[str]:
    """Texts of up to so many words, some empty."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(words + 1))) for _ in range(rows)]


def references(rows: int, seed: int) -> list[list[str]]:
    """One to five texts for each row, none empty."""
    draw = random.Random(seed)
    return [[f"x {text}" for text in corpus(draw.randrange(1, 6), 100 * seed + i)] for i in range(rows)]


TRUTH = references(60, 7)
GOOD = [refs[-1].removeprefix("x ") if i % 2 else refs[0] for i, refs in enumerate(TRUTH)]
POOR = corpus(60, 9)


def close(a: tuple[float, float], b: tuple[float, float], tolerance: float = 1e-9) -> bool:
    """Whether both ends of two intervals agree."""
    return a == pytest.approx(b, abs=tolerance)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rows", "words"), [(1, 3), (3, 2), (40, 12)])
def test_summed_rows_give_sacrebleus_corpus_score(rows: int, words: int, seed: int) -> None:
    """With as many references per row as come, and where no 4-gram matches, or no text has one (smoothing)."""
    from sacrebleu.metrics import BLEU

    texts, refs = corpus(rows, seed, words), references(rows, seed)
    # sacrebleu takes one list per reference position; None marks a row that has fewer.
    columns = [[r[i] if i < len(r) else None for r in refs] for i in range(max(map(len, refs)))]
    assert Bleu().score(texts, refs) == pytest.approx(BLEU(lowercase=True).corpus_score(texts, columns).score, abs=1e-9)


def test_rouge_l_is_the_mean_of_the_best_reference() -> None:
    """By hand: precision and recall of the longest common subsequence."""
    refs = [["the cat sat on mats", "no"], ["a dog"], ["nothing"]]
    rows = RougeL().rows(["The cats sat", "a dog", ""], refs)
    assert rows[:, 0] == pytest.approx([2 * 1 * 0.6 / 1.6, 1, 0])
    assert RougeL().score(["The cats sat", "a dog", ""], refs) == pytest.approx(100 * 1.75 / 3)


@pytest.mark.parametrize("metric", DEFAULT, ids=lambda metric: metric.name)
def test_scores_are_bounded_and_do_not_depend_on_order(metric: Metric) -> None:
    """Of rows, or of a row's references."""
    assert metric.score(TRUTH[0][:1], TRUTH[:1]) == pytest.approx(100)
    assert 0 <= metric.score(POOR, TRUTH) < metric.score(GOOD, TRUTH) <= 100
    order = random.Random(0).sample(range(60), 60)
    shuffled = metric.score([GOOD[i] for i in order], [TRUTH[i][::-1] for i in order])
    assert shuffled == pytest.approx(metric.score(GOOD, TRUTH), abs=1e-9)


@pytest.mark.parametrize("metric", DEFAULT, ids=lambda metric: metric.name)
def test_bootstrap_is_paired(metric: Metric) -> None:
    """Both systems are scored on the same resampled rows."""
    good, poor = metric.rows(GOOD, TRUTH), metric.rows(POOR, TRUTH)
    low, high = bootstrap(metric, good, poor)
    assert bootstrap(metric, good, good) == (0, 0)
    assert 0 < low < metric.score(GOOD, TRUTH) - metric.score(POOR, TRUTH) < high
    assert close(bootstrap(metric, poor, good), (-high, -low))
    assert bootstrap(metric, good, poor) == (low, high) != bootstrap(metric, good, poor, seed=1)
    # Another order is another draw of the same distribution: the interval moves by what a thousand samples leave open.
    order = np.random.default_rng(0).permutation(60)
    assert close(bootstrap(metric, good[order], poor[order]), (low, high), tolerance=0.1 * (high - low))


def test_bootstrap_scores_a_resampled_corpus_as_the_corpus_it_is() -> None:
    """With one row there is one corpus to draw, however it is drawn."""
    good, poor = Bleu().rows(GOOD[:1], TRUTH[:1]), Bleu().rows(POOR[:1], TRUTH[:1])
    lead = Bleu().score(GOOD[:1], TRUTH[:1]) - Bleu().score(POOR[:1], TRUTH[:1])
    assert close(bootstrap(Bleu(), good, poor, samples=3), (lead, lead))


def test_what_cannot_be_scored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is wrong, or the extra that is missing."""
    rows = RougeL().rows(POOR, TRUTH)
    with pytest.raises(ValueError, match="same rows"):
        bootstrap(RougeL(), rows, rows[:-1])
    with pytest.raises(ValueError, match="shorter"):
        Bleu().score(["a", "b"], [["a"]])
    for metric in DEFAULT:
        with pytest.raises(ValueError, match="no texts"):
            metric.score([], [])
    for package in ("sacrebleu", "rouge_score", "rouge_score.rouge_scorer", "bert_score"):
        monkeypatch.setitem(sys.modules, package, None)
    for metric, extra in zip((*DEFAULT, BertScore("any")), ("eval", "eval", "bertscore"), strict=True):
        with pytest.raises(ImportError, match=rf"pip install 'skipdecode\[{extra}\]'"):
            metric.score(["a"], [["a"]])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT of random weights and a WordPiece tokenizer, as a directory."""
    pytest.importorskip("bert_score")
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "ran"]
    BertTokenizer(vocab=dict(zip(pieces, range(11), strict=True)), model_max_length=32).save_pretrained(folder)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(vocab_size=11, max_position_embeddings=32, **shape)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("layers", [None, 1])
def test_bert_score_takes_the_best_reference(encoder: str, layers: int | None) -> None:
    """A row is worth its best reference, and nothing where the text or all references are empty."""
    metric = BertScore(encoder, layers)
    texts = ["the cat sat", "a dog ran", "", "the cat"]
    refs = [["a dog", "the cat sat"], ["a cat ran", ""], ["the cat"], [""]]
    rows = metric.rows(texts, refs)[:, 0]
    assert rows[0] == pytest.approx(1, abs=1e-5)
    assert 0 < rows[1] < 1
    assert list(rows[2:]) == [0, 0]
    assert metric.score(texts[:1], refs[:1]) == pytest.approx(100, abs=1e-3)
    assert metric.score(["", ""], [["a"], [""]]) == 0


def test_bert_score_compares_the_layer_it_is_told(encoder: str) -> None:
    """Another layer gives another score."""
    one, last = (BertScore(encoder, n).score(["a dog ran"], [["the cat sat"]]) for n in (1, None))
    assert one != pytest.approx(last)
    assert last == pytest.approx(BertScore(encoder, 3).score(["a dog ran"], [["the cat sat"]]))


def test_bert_score_without_its_model_says_what_to_give(encoder: str, tmp_path: Path) -> None:
    """Before it computes anything."""
    with pytest.raises(ValueError, match="give the directory of an encoder"):
        BertScore(str(tmp_path)).score(["a"], [["a"]])
    with pytest.raises(ValueError, match="between 0 and 3"):
        BertScore(encoder, 4).score(["a"], [["a"]])
    unlimited = shutil.copytree(encoder, tmp_path / "unlimited")
    settings = unlimited / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 10**30}))
    with pytest.raises(ValueError, match="must say model_max_length"):
        BertScore(str(unlimited)).score(["a"], [["a"]])


@pytest.mark.parametrize("layer", [1, None])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_an_encoder_never_runs(
    encoder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layer: int | None,
    file: str,
) -> None:
    """F2: bert-score lets transformers ask on standard input."""
    folder = shutil.copytree(encoder, tmp_path / "encoder")
    (folder / "spy.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    names = {"AutoConfig": "spy.Config", "AutoModel": "spy.Model", "AutoTokenizer": [None, "spy.Tokens"]}
    kind = {"model_type": "spy"} if file == "config.json" else {"tokenizer_class": "Tokens"}
    for name in ("config.json", file):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"auto_map": names} | (kind if name == file else {})))
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\nyes\nyes\n"))
    with contextlib.suppress(ModelError):
        BertScore(str(folder), layer).score(["a dog ran"], [["the cat sat"]])
    assert not (tmp_path / "ran").exists()
    assert "Do you wish" not in capsys.readouterr().out
