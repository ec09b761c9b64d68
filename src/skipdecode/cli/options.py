"""Options that several verbs share, so that they have one name, one range and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

#: More tokens, rows or words than anybody means: a slip that would run for ever or fill the memory.
MOST = 1_000_000

Model = Annotated[
    str,
    Argument(metavar="MODEL", help="Directory, hub name, or 'demo' for the embedded checkpoint.", show_default=False),
]
Revision = Annotated[str | None, Option(help="Branch, tag or commit of a hub model.")]
Attention = Annotated[
    str | None, Option("--attn-implementation", help="eager, sdpa, …; transformers' choice if left out.")
]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Option(help="Type of the weights.")]
Device = Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.")]

Task = Annotated[
    Literal["jsonl", "e2e", "reddit_tldr", "cnn_dm"],
    Option(
        help="Format of the rows: jsonl takes any data, the others are data sets with a prompt format of their own."
    ),
]
Data = Annotated[Path, Option(help="Folder with the task's files, a hub data set, or one JSONL or CSV file.")]
PromptColumn = Annotated[str | None, Option(help="Column of the prompts, if it is not prompt, messages or text.")]
ResponseColumn = Annotated[str | None, Option(help="Column of the responses, if it is not response or completion.")]
PromptShare = Annotated[
    float | None,
    Option(
        min=0,
        max=0.99,
        help="Rows of plain text: this share of the words is the prompt; 0: only the begin-of-text token.",
    ),
]
MaxSourceWords = Annotated[int | None, Option(min=1, max=MOST, help="Summaries: cut a source after so many words.")]

BatchSize = Annotated[int, Option(min=1, max=MOST, help="Rows decoded together.")]
MaxNewTokens = Annotated[int | None, Option(min=1, max=MOST, help="Default: the task's (jsonl 128, e2e 80).")]
Json = Annotated[bool, Option("--json", help="The result as JSON on the last line of standard output.")]
