"""A data set of a model's own outputs, for `skipdecode train`: train.jsonl and validation.jsonl.

    python recipes/own_data.py OUTPUTS.jsonl FOLDER [--held-out 128]

OUTPUTS is what `skipdecode generate --do-sample --speedup 1` wrote, or a run's self_generated.jsonl. Outputs of the
last prompts are held out; no prompt is in both files.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer


def main(outputs: Path, folder: Path, held_out: int = 128) -> None:
    """Write FOLDER."""
    rows = [json.loads(line) for line in outputs.read_text(encoding="utf-8").splitlines()]
    groups: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        prompt = row.get("messages") or row.get("prompt")
        response = row.get("text", row.get("response"))
        if not str(response or "").strip():
            continue
        made = {"prompt": prompt, "response": response}
        if row.get("finish_reason") == "length":
            made["finish_reason"] = "length"
        groups.setdefault(json.dumps(prompt), []).append(made)
    split = max(len(groups) - held_out, 0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", [*groups.values()][:split]), ("validation", [*groups.values()][split:])):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for group in chosen for row in group)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
