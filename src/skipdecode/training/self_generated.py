"""Self-generated texts: what the full model writes itself, so that distillation needs no data."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..data.chat import Prompt, as_json
from ..data.examples import read_rows, subsample
from ..data.tasks import Example, Task
from ..errors import DataError
from ..files import write
from ..generation.job import GenerationJob
from ..generation.stats import Completion

#: Sampling of texts from the model's own distribution, at a temperature.
SAMPLING: dict[str, Any] = {"do_sample": True, "top_p": 1.0, "top_k": 0}

#: Tells the user something.
Say = Callable[[str], object]
log = logging.getLogger(__name__).warning
#: Writes the texts behind prompts with options of ``model.generate``, under a name for the user. None stands for a
#: prompt that is too long.
Write = Callable[[Sequence[Prompt], dict[str, Any], str], Sequence[Completion | None]]


def self_generate(
    prompts: Sequence[Prompt],
    task: Task,
    count: int,
    max_new_tokens: int | None,
    temperature: float | None,
    write: Write,
    say: Say,
) -> list[Example]:
    """Up to ``count`` texts that a model writes behind prompts, without those that teach nothing.

    Of many prompts evenly spaced ones are taken, and each of few several times. ``max_new_tokens`` is the task's by
    default, and ``temperature`` 0.5, where texts are easier to learn; 1 from a single prompt, whose texts would repeat.
    Raises DataError if no text is left.
    """
    chosen = subsample(prompts, count)
    rows = [chosen[i % len(chosen)] for i in range(count)]
    if temperature is None:
        temperature = 1.0 if len(chosen) == 1 else 0.5
    options = SAMPLING | {"temperature": temperature, "max_new_tokens": max_new_tokens or task.max_new_tokens}
    texts = keep_texts(rows, write(rows, options, "texts"), say)
    if not texts:
        raise DataError("no text is left to learn from: give other --prompts, or another --temperature")
    return texts


def keep_texts(
    prompts: Sequence[Prompt], completions: Sequence[Completion | None], say: Say, *, ended: bool = False
) -> list[Example]:
    """Texts without those that are empty, end in a loop, or were written before for the same prompt.

    None stands for a prompt that was too long; ``ended`` leaves out texts that were cut off at ``max_new_tokens``.
    """
    texts: dict[Example, None] = {}
    left_out: Counter[str] = Counter()
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion is None:
            left_out["refused"] += 1
            continue
        cut = completion.finish_reason == "length"
        text = completion.text.removesuffix("\ufffd") if cut else completion.text  # of a cut character
        example = Example(prompt, (text,), cut)
        if not text.strip():
            left_out["empty"] += 1
        elif ends_in_loop(text.rstrip()):
            left_out["looping"] += 1
        elif ended and cut:
            left_out["cut off"] += 1
        elif example in texts:
            left_out["repeated"] += 1
        else:
            texts[example] = None
    if left_out:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        say(f"left out of what the model generated: {counts}")
    return list(texts)


def ends_in_loop(text: str) -> bool:
    """Whether a text ends in four equal pieces of six characters at least."""
    return re.match(r"(.{6,}?)\1{3}", text[::-1], re.DOTALL) is not None


def hold_out(texts: Sequence[Example], most: int) -> tuple[list[Example], list[Example]]:
    """Texts to learn from, and at most ``most`` to evaluate with.

    The latter are all texts of a tenth of the prompts, since texts of one prompt are alike. With fewer than ten prompts
    they are a tenth of the texts.
    """
    prompts = list(dict.fromkeys(text.prompt for text in texts))
    if len(prompts) < 10:
        count = min(most, len(texts) // 10)
        return list(texts[count:]), list(texts[:count])
    held = set(prompts[: min(most, len(prompts) // 10)])
    learned = [text for text in texts if text.prompt not in held]
    return learned, [text for text in texts if text.prompt in held][:most]


def write_with_job(job: GenerationJob, bar: tqdm) -> list[Completion | None]:
    """Completions of a job, whose output is kept, so that a killed run goes on after its last batch."""

    def start(total: int, done: int) -> None:
        bar.reset(total)
        bar.update(done)

    file = Path(str(job.output))
    if not file.exists():
        job.run(on_start=start, on_batch=lambda stats: bar.update(stats.rows))
    rows = [row for _, row in read_rows(file)]
    return [Completion(row["text"], row["tokens"], row["finish_reason"]) if "text" in row else None for row in rows]


def save_texts(file: Path, texts: Sequence[Example]) -> None:
    """Write texts as JSONL, which :func:`~skipdecode.data.examples.read_examples` reads back."""
    lines = []
    for text in texts:
        reason = {"finish_reason": "length"} if text.cut else {}
        row = {"prompt": as_json(text.prompt), "response": text.references[0]} | reason
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write(file, "".join(lines))
