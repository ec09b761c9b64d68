"""A data set of a model's own texts: train.jsonl and validation.jsonl with responses, test.jsonl with prompts alone.

    python recipes/own_data.py MODEL FOLDER [--prompts FILE] [--count 5000] [--max-new-tokens 200] [--temperature 1]
        [--dtype bfloat16] [--engine vllm]

Without prompts the texts follow the begin-of-text token, and each is cut into a prompt and its response. The same
command goes on after an interruption.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer

from skipdecode.adapters.own_texts import SAMPLED, own_texts, read_prompts
from skipdecode.data.tasks import get_task
from skipdecode.engines import get_engine
from skipdecode.generation.jobs import GenerationJob

#: Texts that are held out for validation, and as many for tests.
HELD_OUT = 128
#: Words of a text that make its prompt, if texts have none.
BEGINNING = 8


def main(
    model: str,
    folder: Path,
    prompts: str = "",
    count: int = 5000,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    dtype: str = "auto",
    engine: str = "transformers",
) -> None:
    """Let MODEL write the texts, and write FOLDER."""
    task = get_task("jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    options = SAMPLED | {"temperature": temperature, "max_new_tokens": max_new_tokens}
    job = GenerationJob(model, task=task, batch_size=128, options=options, dtype=dtype, engine=get_engine(engine))
    texts = own_texts(job, read_prompts(prompts or None, task), count, folder / "own_texts.jsonl", say=typer.echo)
    rows: list[tuple[object, str]] = [(each.prompt, each.references[0]) for each in texts]
    if not prompts:
        cut = (re.match(rf"((?:\S+\s+){{{BEGINNING - 1}}}\S+)(.+)", text.lstrip(), re.DOTALL) for _, text in rows)
        rows = [(match[1], match[2]) for match in cut if match]
    test, validation, train = rows[:HELD_OUT], rows[HELD_OUT : 2 * HELD_OUT], rows[2 * HELD_OUT :]
    if prompts:  # which come again when all had their turn: what is held out is the prompt
        known = {repr(prompt) for prompt, _ in test + validation}
        train = [row for row in train if repr(row[0]) not in known]
    write(folder / "train.jsonl", [as_row(prompt) | {"response": text} for prompt, text in train])
    write(folder / "validation.jsonl", [as_row(prompt) | {"response": text} for prompt, text in validation])
    write(folder / "test.jsonl", [as_row(prompt) for prompt, _ in test])


def as_row(prompt: object) -> dict[str, object]:
    """Return the columns of a prompt: a text, or messages."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"messages": [message._asdict() for message in prompt]}  # type: ignore[attr-defined]


def write(file: Path, rows: list[dict[str, object]]) -> None:
    """Write JSONL."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
