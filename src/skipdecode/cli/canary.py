"""``skipdecode canary``: how far the speeds of a running server are from its full depth."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from ..errors import UsageError
from . import options as o
from .console import Bar, print_table, say

Url = Annotated[str, Argument(metavar="URL", help="A server that skipdecode serve started.", show_default=False)]
Speedups = Annotated[str | None, Option(help="Of those that the server offers (default: all but 1).")]
Count = Annotated[int, Option(min=1, max=o.MOST, help="Take only the first so many inputs.")]
Tokens = Annotated[int, Option("--max-new-tokens", min=2, max=o.MOST, help="Longest text, in tokens.")]
Concurrency = Annotated[int, Option(min=1, max=1000, help="Requests at a time.")]
ApiKey = Annotated[str | None, Option(envvar="OPENAI_API_KEY", show_envvar=True, help="The server's --api-key.")]
MaxKl = Annotated[float | None, Option(min=0, help="Exit with 1 if a speed is further than this from full depth.")]
Metrics = Annotated[Path | None, Option(help="Write the figures for Prometheus (node_exporter's textfile collector).")]


def canary(
    url: Url,
    data: o.Data,
    task: o.Task = "jsonl",
    speedups: Speedups = None,
    limit: Count = 32,
    max_new_tokens: Tokens = 64,
    concurrency: Concurrency = 8,
    prompt_column: o.PromptColumn = None,
    chat: o.Chat = False,
    api_key: ApiKey = None,
    max_kl: MaxKl = None,
    metrics: Metrics = None,
    as_json: o.Json = False,
) -> None:
    """Compare the speeds of a running server with its full depth, on your prompts.

    Each speed writes a greedy text for each prompt, which the server then reads as a prompt, at full depth.

    skipdecode canary http://localhost:8000 --data prompts.jsonl --max-kl 0.6
    """
    from ..data.chat import Message
    from ..data.inputs import read_examples
    from ..data.tasks import get_task
    from ..evaluation.canary import Server, canary, is_metrics, metrics_text
    from ..files import check_target, write

    if metrics:
        check_target(metrics, may_replace=is_metrics)
    examples = read_examples(get_task(task, prompt_column=prompt_column), data, "test", say)[:limit]
    if not examples:
        raise UsageError(f"{data} holds no prompts")
    prompts = [each.prompt for each in examples]
    if chat:
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise UsageError("the inputs are conversations already: leave --chat out")
        prompts = [(Message("user", str(prompt)),) for prompt in prompts]
    with Bar() as bar:
        found = canary(
            Server(url, api_key),
            prompts,
            speedups=o.parse_numbers(speedups) if speedups else None,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            on_text=lambda done, total: bar.show("texts", done, total),
        )
    rows = []
    for each in found:
        figures = f"{each.kl:.3f}", f"{each.same_token:.1%}", f"{each.nats:.2f}"
        rows.append([each.name, str(each.texts), f"{each.tokens:,}", *figures])
    print_table(["model", "texts", "tokens", "KL", "same token", "nats of its texts"], rows)
    if metrics:
        write(metrics, metrics_text(found, time.time()), may_replace=is_metrics)
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
    if max_kl is not None and (far := [each.name for each in found if not each.kl <= max_kl]):
        say(f"further than {max_kl:g} nats from full depth: {', '.join(far)}")
        raise Exit(1)
