"""A data set of a model's own texts: train.jsonl and validation.jsonl with responses, test.jsonl with prompts alone.

    python recipes/own_data.py MODEL FOLDER [--prompts FILE] [--count 5000] [--max-new-tokens 200] [--temperature 1]
        [--dtype bfloat16] [--engine vllm]

Without prompts the texts follow the begin-of-text token, and each is cut into a prompt and its response. The same
command goes on after an interruption.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import typer

from skipdecode.data.chat import Prompt, as_json
from skipdecode.data.tasks import Example, get_task
from skipdecode.generation.engines import get_engine
from skipdecode.generation.job import GenerationJob
from skipdecode.training.self_generated import SAMPLED, hold_out, own_texts, read_prompts

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
    if any(folder.glob("*.jsonl*")) and not any(folder.glob("own_texts.*")):
        raise SystemExit(f"{folder} holds other data: give another folder")
    options = SAMPLED | {"temperature": temperature, "max_new_tokens": max_new_tokens}
    job = GenerationJob(model, task=task, batch_size=128, options=options, dtype=dtype, engine=get_engine(engine))
    texts = own_texts(job, read_prompts(prompts or None, task), count, folder / "own_texts.jsonl", say=typer.echo)
    learned, held = hold_out(texts, 2 * HELD_OUT)
    train, others = (_rows(part, split=not prompts) for part in (learned, held))
    test, validation = others[: len(others) // 2], others[len(others) // 2 :]
    for name, rows in (("train", train), ("validation", validation)):
        ends = {False: {}, True: {"finish_reason": "length"}}
        write(folder / f"{name}.jsonl", [as_row(prompt) | {"response": text} | ends[cut] for prompt, text, cut in rows])
    write(folder / "test.jsonl", [as_row(prompt) for prompt, _, _ in test])


def _rows(texts: Sequence[Example], split: bool) -> list[tuple[Prompt, str, bool]]:
    """Return prompts, responses, and whether these were cut off; ``split`` makes both of a text without a prompt."""
    if not split:
        return [(each.prompt, each.references[0], each.cut) for each in texts]
    parts = rf"((?:\S+\s+){{{BEGINNING - 1}}}\S+)(.+)"
    found = ((re.match(parts, each.references[0].lstrip(), re.DOTALL), each.cut) for each in texts)
    return [(match[1], match[2], cut) for match, cut in found if match]


def as_row(prompt: Prompt) -> dict[str, object]:
    """Return the columns of a prompt: a text, or messages."""
    return {"prompt" if isinstance(prompt, str) else "messages": as_json(prompt)}


def write(file: Path, rows: list[dict[str, object]]) -> None:
    """Write JSONL."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
