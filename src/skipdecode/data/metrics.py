"""Metrics as statistics of each text, so that a bootstrap scores resampled corpora without reading texts again."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtra, UsageError

Array = NDArray[np.float64]

#: Scripts that leave no space between words: Thai, Lao, Burmese, Khmer, kana, Han.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")


def words(text: str) -> list[str]:
    """Split a text into words and single punctuation marks; of an ``UNSPACED`` script each character is a word."""
    return WORD.findall(text)


class Metric(ABC):
    """A score of a corpus, 0 to 100, computed from statistics summed over its texts."""

    #: Name in JSON.
    name: str
    #: Name in tables.
    label: str

    @abstractmethod
    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Return (n, k): the statistics of each of n texts against all its references."""

    @abstractmethod
    def corpus(self, totals: Array, n: int) -> float:
        """Return the score of ``n`` texts whose statistics sum to ``totals`` (k,)."""

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """Return the score of all texts. Raises UsageError if there are none."""
        if not texts:
            raise UsageError(f"{self.label} of no texts")
        rows = self.rows(texts, references)
        return self.corpus(rows.sum(axis=0), len(rows))


class Bleu(Metric):
    """BLEU of sacrebleu with its defaults (13a tokens, exponential smoothing), but lower-cased."""

    name = "bleu"
    label = "BLEU"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Return (n, 10): matched and possible 1- to 4-grams, and the lengths of text and closest reference."""
        # effective_order changes only the score, not the counts; without it sacrebleu warns at every sentence.
        bleu = _package("sacrebleu").BLEU(lowercase=True, effective_order=True)
        scores = [bleu.sentence_score(text, list(refs)) for text, refs in zip(texts, references, strict=True)]
        return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=np.float64)

    def corpus(self, totals: Array, n: int) -> float:
        """Return sacrebleu's corpus BLEU from the summed statistics."""
        counts = [int(total) for total in totals]
        bleu = _package("sacrebleu").BLEU
        return float(bleu.compute_bleu(counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp").score)


class _Mean(Metric):
    """A metric that is the mean of the texts' own scores."""

    def corpus(self, totals: Array, n: int) -> float:
        """Return the mean of ``n`` texts' scores, whose sum is ``totals``, as a percentage."""
        return 100 * float(totals[0]) / n


class RougeL(_Mean):
    """ROUGE-L with stemming: the F-measure against the best reference.

    rouge-score knows the letters a to z alone. Where most letters of the references are others, it counts
    :func:`words`, lower-cased and not stemmed.
    """

    name = "rouge_l"
    label = "ROUGE-L"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Return (n, 1): each text's F-measure (0 to 1) against its best reference."""
        letters = [each for refs in references for ref in refs for each in ref if each.isalpha()]
        own = None if 2 * sum(map(str.isascii, letters)) >= len(letters) else self
        scorer = _package("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True, tokenizer=own)
        pairs = zip(texts, references, strict=True)
        return np.array([[scorer.score_multi(refs, text)["rougeL"].fmeasure] for text, refs in pairs])

    def tokenize(self, text: str) -> list[str]:
        """Return a text's :func:`words`, lower-cased."""
        return words(text.lower())


class Agreement(_Mean):
    """ROUGE-L between texts and another system's (the full model's), passed as references; words of any script.

    Nothing is stemmed or lower-cased; equal texts score 1, empty ones too.
    """

    name = "agreement"
    label = "agreement"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Return (n, 1): each text's F-measure (0 to 1) against its best reference; 1 if they are equal."""
        scorer = _package("rouge_score.rouge_scorer").RougeScorer(["rougeL"], tokenizer=self)
        pairs = zip(texts, references, strict=True)
        return np.array(
            [[1.0 if text in refs else scorer.score_multi(refs, text)["rougeL"].fmeasure] for text, refs in pairs]
        )

    def tokenize(self, text: str) -> list[str]:
        """Return a text's :func:`words`."""
        return words(text)


class Repetition(_Mean):
    """How much texts repeat themselves: the share of 4-grams that a text had before (Welleck et al., 2020).

    References are not looked at.
    """

    name = "repetition"
    label = "repeated 4-grams"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Return (n, 1): each text's share (0 to 1), of words and punctuation marks; 0 without any 4-gram."""
        grams = [[*zip(*(each[i:] for i in range(4)), strict=False)] for each in map(words, texts)]
        return np.array([[1 - len({*each}) / len(each) if each else 0.0] for each in grams])


def distinct(texts: Sequence[str]) -> float:
    """Return how varied texts are: the percentage of different ones among all their 2-grams (Li et al., 2016).

    It falls with the length and number of texts: compare it only between texts for the same prompts. 0 without any.
    """
    grams = [gram for each in map(words, texts) for gram in pairwise(each)]
    return 100 * len({*grams}) / len(grams) if grams else 0.0


DEFAULT: tuple[Metric, ...] = (Bleu(), RougeL())


def paired_scores(
    metric: Metric, systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> tuple[list[float], tuple[float, float]]:
    """Return the score of each system's texts, and the :func:`bootstrap` interval of the last minus the one before."""
    rows = [metric.rows(texts, references) for texts in systems]
    return [metric.corpus(each.sum(0), len(each)) for each in rows], bootstrap(metric, rows[-1], rows[-2])


def bootstrap(metric: Metric, rows_a: Array, rows_b: Array, samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile interval of system a's score minus b's, by paired bootstrap (Koehn, 2004).

    Args:
        metric: the metric.
        rows_a, rows_b: ``metric.rows`` of two systems' texts for the same inputs.
        samples: number of resampled corpora.
        seed: of the resampling.
    """
    n, drawn = len(rows_a), draws(len(rows_a), samples, seed)
    totals = zip(drawn @ rows_a, drawn @ rows_b, strict=True)
    low, high = np.percentile([metric.corpus(a, n) - metric.corpus(b, n) for a, b in totals], (2.5, 97.5))
    return float(low), float(high)


def draws(n: int, samples: int = 1000, seed: int = 0) -> Array:
    """Return how often each of ``n`` inputs is in each of ``samples`` bootstrap samples, (samples, n)."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=samples).astype(float)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtra(f"{name.split('.')[0]} is missing: pip install 'skipdecode[eval]'") from None
