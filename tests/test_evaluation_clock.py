"""Evaluation of faster layers, and calibration to speed-ups of the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import write_examples
from skipdecode.errors import SkipDecodeError
from skipdecode.evaluation import evaluate as evaluation
from skipdecode.evaluation.evaluate import EvaluationPlan, evaluate
from skipdecode.loading.load import load

FEW: dict[str, Any] = {"max_new_tokens": 9, "batch_size": 4, "timing_rows": 8, "repeats": 1}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts with responses."""
    return write_examples(tmp_path / "rows.jsonl")


def test_what_makes_layers_faster_holds_for_every_row_and_is_said(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full model's too: like is compared with like. Without it the rows are other rows."""
    loaded: list[dict[str, Any]] = []

    def spied(*args: Any, **kwargs: Any) -> Any:
        loaded.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(evaluation, "load", spied)
    given: dict[str, Any] = {"speedups": (2,), "output": tmp_path / "out", **FEW}
    faster = {"prepack": True}
    results = evaluate(EvaluationPlan(str(checkpoint), data, faster=faster, **given), say=lambda _: None)
    assert loaded
    assert all(options["prepack"] for options in loaded)
    assert results.about["made faster"] == "{'prepack': True}"
    with pytest.raises(SkipDecodeError, match="other settings"):
        evaluate(EvaluationPlan(str(checkpoint), data, **given), say=lambda _: None)


@pytest.mark.parametrize(
    ("faster", "says"),
    [({"quantization": "int3"}, "quantization is int8"), ({"quantization": "int8", "prepack": True}, "leave one of")],
)
def test_refused_before_weights_are_read(
    checkpoint: Path, data: Path, tmp_path: Path, faster: dict[str, Any], says: str
) -> None:
    """What cannot be had is said first."""
    with pytest.raises(SkipDecodeError, match=says):
        evaluate(EvaluationPlan(str(checkpoint), data, faster=faster, output=tmp_path), say=lambda _: None)
    assert not list(tmp_path.glob("rows/*.json"))
