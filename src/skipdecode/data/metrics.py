"""Metrics kept as statistics of each row, so that a resampled corpus is scored exactly and at no further cost."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtra, ModelError, UsageError

Array = NDArray[np.float64]


class Metric(ABC):
    """A score of a corpus, from 0 to 100, that is a function of sums over its rows."""

    #: What it is called in JSON.
    name: str
    #: What it is called in tables.
    label: str

    @abstractmethod
    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Statistics of each text against all its references, one row per text: (n, k)."""

    @abstractmethod
    def corpus(self, totals: Array, n: int) -> float:
        """The score of ``n`` rows whose statistics sum to ``totals`` (k,)."""

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """The score of all texts. Raises UsageError if there are none."""
        if not texts:
            raise UsageError(f"{self.label} of no texts")
        rows = self.rows(texts, references)
        return self.corpus(rows.sum(axis=0), len(rows))


class Bleu(Metric):
    """Lower-cased sacrebleu, otherwise with its defaults: 13a tokens, exponential smoothing."""

    name = "bleu"
    label = "BLEU"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Matched and possible n-grams (n = 1 to 4), the text's length, the closest reference's."""
        # effective_order changes a sentence's score, never its counts; without it sacrebleu warns at every row.
        bleu = _package("sacrebleu").BLEU(lowercase=True, effective_order=True)
        scores = [bleu.sentence_score(text, list(refs)) for text, refs in zip(texts, references, strict=True)]
        return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=np.float64)

    def corpus(self, totals: Array, n: int) -> float:
        """Corpus BLEU as sacrebleu computes it."""
        counts = [int(total) for total in totals]
        bleu = _package("sacrebleu").BLEU
        return float(bleu.compute_bleu(counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp").score)


class _Mean(Metric):
    """The mean of a row's own score."""

    def corpus(self, totals: Array, n: int) -> float:
        """The mean, as a percentage."""
        return 100 * float(totals[0]) / n


class RougeL(_Mean):
    """ROUGE-L with stemming: the F-measure against the best of the references."""

    name = "rouge_l"
    label = "ROUGE-L"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """The F-measure (0 to 1)."""
        scorer = _package("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)
        pairs = zip(texts, references, strict=True)
        return np.array([[scorer.score_multi(refs, text)["rougeL"].fmeasure] for text, refs in pairs])


class Agreement(_Mean):
    """How much of another system's texts (the full model's) these repeat: ROUGE-L over words of any script.

    No reference is needed. Nothing is stemmed or lower-cased, and equal texts agree wholly, empty ones too.
    """

    name = "agreement"
    label = "agreement"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """The F-measure (0 to 1)."""
        scorer = _package("rouge_score.rouge_scorer").RougeScorer(["rougeL"], tokenizer=self)
        pairs = zip(texts, references, strict=True)
        return np.array(
            [[1.0 if text in refs else scorer.score_multi(refs, text)["rougeL"].fmeasure] for text, refs in pairs]
        )

    def tokenize(self, text: str) -> list[str]:
        """Words, and marks one by one."""
        return re.findall(r"\w+|[^\w\s]", text)


@dataclass(frozen=True)
class BertScore(_Mean):
    """BERTScore: F1 against the best of the references, neither weighted by idf nor rescaled.

    Attributes:
        model: a directory or a hub name.
        num_layers: the layer whose states are compared; None takes the one bert-score found best for a model of that
            name, and the last layer of a model it does not know.
    """

    model: str
    num_layers: int | None = None

    name = "bert_score"
    label = "BERTScore"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """F1 (0 to 1; an empty text has 0). Raises ModelError if the model cannot be loaded."""
        bert_score = _package("bert_score", "bertscore")
        result = np.zeros((len(texts), 1))
        # What is empty scores 0; bert-score would ask the tokenizer for a method that transformers 5 no longer has.
        pairs = [(text, [r for r in refs if r.strip()]) for text, refs in zip(texts, references, strict=True)]
        filled = [i for i, (text, refs) in enumerate(pairs) if text.strip() and refs]
        if not filled:
            return result
        candidates, targets = [pairs[i][0] for i in filled], [pairs[i][1] for i in filled]
        try:
            _, _, f1 = bert_score.score(candidates, targets, model_type=self.model, num_layers=self._layer())
        except OverflowError:
            raise ModelError(f"{self.model}: its tokenizer_config.json must say model_max_length") from None
        except (OSError, ValueError, AssertionError) as error:
            raise ModelError(
                f"BERTScore cannot load {self.model}; give the directory of an encoder with its tokenizer, or a name "
                f"that the hub or its cache has: {error}"
            ) from None
        result[filled, 0] = f1.numpy()
        return result

    def _layer(self) -> int:
        from transformers import AutoConfig, AutoTokenizer

        # Said no here: bert-score lets transformers ask, on standard input, whether to run a checkpoint's code.
        config = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
        AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        best = import_module("bert_score.utils").model2layers
        layer = self.num_layers or best.get(self.model) or best.get(Path(self.model).name)
        return layer or int(config.num_hidden_layers)


DEFAULT: tuple[Metric, ...] = (Bleu(), RougeL())


def bootstrap(metric: Metric, rows_a: Array, rows_b: Array, samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Paired bootstrap (Koehn, 2004): how far the lead of one system over another hangs on the rows it was measured on.

    Args:
        metric: what ``rows_a`` and ``rows_b`` are statistics of.
        rows_a, rows_b: two systems' statistics of the same rows.
        samples: resampled corpora.
        seed: of the resampling.

    Returns:
        The 95% percentile interval of a's score minus b's.
    """
    if rows_a.shape != rows_b.shape or not len(rows_a):
        raise ValueError(f"a paired bootstrap needs the same rows twice, not {len(rows_a)} and {len(rows_b)}")
    n = len(rows_a)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=samples)
    totals = zip(drawn @ rows_a, drawn @ rows_b, strict=True)
    low, high = np.percentile([metric.corpus(a, n) - metric.corpus(b, n) for a, b in totals], (2.5, 97.5))
    return float(low), float(high)


def _package(name: str, extra: str = "eval") -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtra(f"{name.split('.')[0]} is missing: pip install 'skipdecode[{extra}]'") from None
