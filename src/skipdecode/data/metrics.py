"""Metrics as statistics of each text, so that a bootstrap scores resampled corpora without reading texts again."""

import functools
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import regex
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Scripts that leave no space between words: each of their characters, with its marks, counts as a word.
UNSPACED = r"\p{scx=Han}\p{scx=Hira}\p{scx=Kana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Tai_Tham}"
CHARACTER = rf"[{UNSPACED}]\p{{M}}*"
#: ``regex``, unlike ``re``, counts vowel signs and accents as parts of a word.
WORD_OR_MARK = regex.compile(rf"{CHARACTER}|[^\W{UNSPACED}]+|[^\w\s]")
WORD_OR_CHARACTER = regex.compile(rf"{CHARACTER}|[^\s{UNSPACED}]+")
ROUGE_WORD = regex.compile(rf"(?=\w){CHARACTER}|[^\W_{UNSPACED}]+")


def words(text: str) -> list[str]:
    """Words and single punctuation marks of a text in any script."""
    return WORD_OR_MARK.findall(unicodedata.normalize("NFC", text))


class Metric(ABC):
    """A score of a corpus, 0 to 100, computed from statistics summed over its texts."""

    name: str  #: in JSON
    label: str  #: in tables

    @abstractmethod
    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Statistics (n, k) of each of n texts against all its references."""

    def corpus(self, totals: Array, n: int) -> float:
        """Score of ``n`` texts whose statistics sum to ``totals`` (k,); by default the mean, as a percentage."""
        return 100 * float(totals[0]) / n

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """Score of all texts."""
        rows = self.rows(texts, references)
        return self.corpus(rows.sum(axis=0), len(rows))


class Bleu(Metric):
    """BLEU of sacrebleu with its defaults (13a tokens, exponential smoothing), but lower-cased."""

    name = "bleu"
    label = "BLEU"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Matched and possible 1- to 4-grams, and the lengths of text and closest reference: (n, 10)."""
        from sacrebleu import BLEU

        # effective_order changes only the score, not the counts; without it sacrebleu warns at every sentence.
        bleu = BLEU(lowercase=True, effective_order=True)
        scores = [bleu.sentence_score(text, list(refs)) for text, refs in zip(texts, references, strict=True)]
        return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=np.float64)

    def corpus(self, totals: Array, n: int) -> float:
        """sacrebleu's corpus BLEU from the summed statistics."""
        from sacrebleu import BLEU

        counts = [int(total) for total in totals]
        return float(BLEU.compute_bleu(counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp").score)


class RougeL(Metric):
    """ROUGE-L of rouge-score with stemming, the F-measure against the best reference, but for words of any script."""

    name = "rouge_l"
    label = "ROUGE-L"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """F-measure, 0 to 1, of each text: (n, 1)."""
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeL"], tokenizer=self)
        pairs = zip(texts, references, strict=True)
        return np.array([[scorer.score_multi(refs, text)["rougeL"].fmeasure] for text, refs in pairs])

    def tokenize(self, text: str) -> list[str]:
        """Lower-cased words of any script, without punctuation; those of a to z are stemmed."""
        found = ROUGE_WORD.findall(unicodedata.normalize("NFC", text.lower()))
        return [_stem()(word) if len(word) > 3 and word.isascii() else word for word in found]


class Agreement(RougeL):
    """ROUGE-L against another model's texts, the full model's: neither stemmed nor lower-cased, with punctuation."""

    name = "agreement"
    label = "ROUGE-L against the full model"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """F-measure, 0 to 1, of each text: (n, 1); equal texts score 1, empty ones too."""
        equal = [[text.strip() in [ref.strip() for ref in refs]] for text, refs in zip(texts, references, strict=True)]
        return np.where(equal, 1.0, super().rows(texts, references))

    def tokenize(self, text: str) -> list[str]:
        """The text's :func:`words`."""
        return words(text)


class Repetition(Metric):
    """Share of 4-grams that a text had before (Welleck et al., 2020); references do not matter."""

    name = "repetition"
    label = "repeated 4-grams"

    def rows(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
        """Share, 0 to 1, of each text: (n, 1); 0 without any 4-gram."""
        grams = [list(zip(*(tokens[i:] for i in range(4)), strict=False)) for tokens in map(words, texts)]
        return np.array([[1 - len(set(own)) / len(own) if own else 0.0] for own in grams])


DEFAULT: tuple[Metric, ...] = (Bleu(), RougeL())


def paired_scores(
    metric: Metric, systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> tuple[list[float], tuple[float, float]]:
    """Score of each system's texts, and the :func:`bootstrap` interval of the last minus the one before."""
    rows = [metric.rows(texts, references) for texts in systems]
    return [metric.corpus(own.sum(axis=0), len(own)) for own in rows], bootstrap(metric, rows[-1], rows[-2])


def bootstrap(metric: Metric, rows_a: Array, rows_b: Array, samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """95% interval of system a's score minus b's, by paired bootstrap (Koehn, 2004), from their :meth:`Metric.rows`."""
    n = len(rows_a)
    drawn = draws(n, samples, seed)
    totals = zip(drawn @ rows_a, drawn @ rows_b, strict=True)
    low, high = np.percentile([metric.corpus(a, n) - metric.corpus(b, n) for a, b in totals], (2.5, 97.5))
    return float(low), float(high)


def draws(n: int, samples: int = 1000, seed: int = 0) -> Array:
    """How often each of ``n`` inputs is in each of ``samples`` bootstrap samples: (samples, n)."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=samples).astype(float)


@functools.cache
def _stem() -> Callable[[str], str]:
    """rouge-score's stemmer, which stems each word once."""
    from nltk.stem.porter import PorterStemmer

    return functools.cache(PorterStemmer().stem)
