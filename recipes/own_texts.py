"""A training file with a model's own outputs.

    python recipes/own_texts.py TRAIN OUTPUTS.jsonl REFERENCE TARGET TIMES OWN_TIMES

OUTPUTS is what `skipdecode generate --speedup 1` wrote: sequence-level distillation (Kim & Rush, 2016). The references
in TRAIN's column REFERENCE go in TIMES times, the model's outputs OWN_TIMES. Other columns stay that both files have.
An output that was cut off keeps its finish_reason, so that no end is learned there. TARGET is CSV or JSONL.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import typer


def read(file: Path) -> pd.DataFrame:
    """Read CSV or JSONL."""
    return pd.read_csv(file) if file.suffix == ".csv" else pd.read_json(file, lines=True)


def main(train: Path, outputs: Path, reference: str, target: Path, times: int, own_times: int) -> None:
    """Write TARGET."""
    people = read(train)
    own = read(outputs)
    own = own[own["text"].fillna("").str.strip() != ""]
    shared = [name for name in people.columns if name in own.columns and name not in (reference, "text", "tokens")]
    if own.empty or not shared or reference not in people.columns:
        raise typer.BadParameter(
            f"{train} needs the column {reference}, and a column of prompts that {outputs} has too"
        )
    own = own.assign(**{reference: own["text"]})
    kept = [*shared, reference]
    if (own["finish_reason"] == "length").any():
        people = people.assign(finish_reason="")
        kept.append("finish_reason")
    rows = pd.concat([people[kept]] * times + [own[kept]] * own_times)
    if target.suffix == ".csv":
        rows.to_csv(target, index=False)
    else:
        rows.to_json(target, orient="records", lines=True, force_ascii=False)


if __name__ == "__main__":
    typer.run(main)
