"""Metrics: sums over rows give what the libraries give for a corpus, and the bootstrap is what it says."""

from __future__ import annotations

import random

import numpy as np
import pytest

from skipdecode.data.metrics import (
    DEFAULT,
    Agreement,
    Bleu,
    Metric,
    Repetition,
    RougeL,
    bootstrap,
    paired_scores,
    words,
)

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


@pytest.mark.parametrize(("rows", "words", "seed"), [(1, 3, 0), (1, 3, 1), (3, 2, 2), (40, 12, 3)])
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


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_repetition_is_what_a_text_had_before(rounds: int) -> None:
    """Of n rounds of the same w different words, all 4-grams but w had been there; without 4-grams nothing is."""
    words = "one two three four five six".split()
    total = rounds * len(words) - 3
    share = Repetition().score([" ".join(words * rounds)], [[]])
    assert share == pytest.approx(100 * (1 - min(len(words), total) / total))
    assert Repetition().score(["", "one two three"], [[], []]) == 0


def test_rouge_l_of_english_is_rouge_scores_own() -> None:
    """Its tokenizer's words, stems included, punctuation and underscores left out."""
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    own = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    texts = [*corpus(40, 3), "snake_case running RUNNING 3.5 don't"]
    refs = [*references(40, 4), ["ran snake cases 3 5 do not"]]
    texts = [text.replace("café", "cafe") for text in texts]
    refs = [[ref.replace("café", "cafe") for ref in row] for row in refs]
    expected = [own.score_multi(row, text)["rougeL"].fmeasure for text, row in zip(texts, refs, strict=True)]
    assert RougeL().rows(texts, refs)[:, 0] == pytest.approx(expected)


def test_a_rows_script_does_not_depend_on_the_others() -> None:
    """Equal texts score 100, whatever stands beside them."""
    texts = ["the cat sat", "猫坐在窗边", "кот сидел", "नमस्ते दुनिया", "cafe\u0301"]
    assert RougeL().rows(texts, [[text] for text in texts])[:, 0] == pytest.approx(1)
    assert RougeL().score(["cafe\u0301"], [["café"]]) == pytest.approx(100)
    assert RougeL().score(["Naïve"], [["naive"]]) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("नमस्ते दुनिया!", ["नमस्ते", "दुनिया", "!"]),
        ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
        ("cafe\u0301 x_y", ["café", "x_y"]),
        ("猫、坐 ok", ["猫", "、", "坐", "ok"]),
        ("ラーメン", ["ラ", "ー", "メ", "ン"]),
        ("It's £20-25", ["It", "'", "s", "£", "20", "-", "25"]),
    ],
)
def test_words_are_whole_in_every_script(text: str, expected: list[str]) -> None:
    """Vowel signs and accents are parts of them; a character is a word where a script has no spaces."""
    assert words(text) == expected


@pytest.mark.parametrize(
    "text", ["猫，坐。", "「猫」・坐、", "ก๚ข", "\u0f40\u0f72\u0f0b\u0f41\u0f0d", "\u1a20\u1a21\u1aa8"]
)
def test_rouge_l_counts_no_punctuation_where_a_character_is_a_word(text: str) -> None:
    """Of Chinese, Thai, Tibetan and Lanna: two characters, the vowel signs with theirs."""
    assert len(RougeL().tokenize(text)) == 2
    assert RougeL().tokenize(text) == [word for word in words(text) if word[0].isalpha()]


@pytest.mark.parametrize("text", ["\u0f40\u0f72\u0f41\u0f0d", "\u1a20\u1a65\u1a21\u1aa8"])
def test_tibetan_and_tai_tham_have_no_spaces(text: str) -> None:
    assert words(text) == [text[:2], text[2], text[3]]


def test_equal_texts_agree_whatever_they_are() -> None:
    """Empty ones too, and but for white space around them; nothing is stemmed or lower-cased."""
    rows = Agreement().rows(["", " a cat\n", "A cat", "cats"], [[""], ["a cat"], ["a cat"], ["cat"]])
    assert rows[:, 0] == pytest.approx([1, 1, 0.5, 0])


def test_systems_are_scored_in_pairs() -> None:
    """Each system's score, and the interval of the last minus the one before."""
    scores, interval = paired_scores(Bleu(), [POOR, GOOD], TRUTH)
    assert scores == [Bleu().score(texts, TRUTH) for texts in (POOR, GOOD)]
    assert interval == bootstrap(Bleu(), Bleu().rows(GOOD, TRUTH), Bleu().rows(POOR, TRUTH))
