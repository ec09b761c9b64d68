"""``skipdecode probe``: what skipping layers would do to a model, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..errors import UsageError
from ..training.form import RANK, ROWS
from . import options as o
from .console import Bar, out, print_table, say

if TYPE_CHECKING:
    from ..training.probe import Probe

PromptFile = Annotated[
    Path | None,
    Option("--prompts", help="File of prompts (default: a chat model's own, else the begin-of-text token)."),
]
Texts = Annotated[int, Option(min=8, max=o.MOST, help="Texts that the model writes; half of them fit the stand-ins.")]
Speedups = Annotated[str, Option(help="Speed-ups to try.")]
Tokens = Annotated[int, Option("--max-new-tokens", min=2, max=o.MOST, help="Longest text, in tokens.")]
Rank = Annotated[int, Option("--adapter-rank", min=1, max=10_000, help="Rank of the stand-ins.")]
Folder = Annotated[Path | None, Option(help="Folder for texts, table and plot; the texts are used again.")]


def probe(
    model: o.Model,
    speedups: Speedups = "1.1,1.25,1.5,2,3",
    prompts: PromptFile = None,
    texts: Texts = 64,
    max_new_tokens: Tokens = 96,
    adapter_rank: Rank = RANK,
    profile: o.ProfileFile = None,
    output: Folder = None,
    batch_size: o.BatchSize = ROWS,
    seed: o.SamplingSeed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Measure, without training, how far a model goes from its full depth when layers are skipped.

    The model writes texts. On them, each speed-up is tried with several choices of layers: bare, and with small linear
    maps in the place of the skipped layers, computed from the texts. An adapter's training starts there.

    With --profile a column says how much faster a decode step of its largest batch gets, without the maps.

    skipdecode probe HuggingFaceTB/SmolLM2-135M-Instruct --prompts prompts.jsonl
    """
    from ..training.probe import probe_model

    if output:  # before hours of work: matplotlib may be missing
        from ..evaluation.plots import draw_probe

        if (output / "probe.png").exists() and not (output / "probe.json").exists():
            raise UsageError(f"{output / 'probe.png'} is there, without a probe's other files: give another folder")
    with Bar() as bar:
        found = probe_model(
            model,
            o.parse_numbers(speedups),
            prompts=prompts,
            count=texts,
            max_new_tokens=max_new_tokens,
            rank=adapter_rank,
            folder=output,
            batch_size=batch_size,
            seed=seed,
            profile=profile,
            where={"dtype": dtype, "device": device, "revision": revision},
            on_progress=bar.show,
            say=say,
        )
    _show(found, revision)
    if output:
        draw_probe(found, output / "probe.png")
        say(f"wrote texts.jsonl, probe.json and probe.png to {output}")
    if as_json:
        print(json.dumps(found.to_dict()))


def _show(found: Probe, revision: str | None) -> None:
    rows = []
    for each in found.tried:
        schedule = each.schedule
        order = f"top, {schedule.warmup} warm-up" if schedule.order == "top" else str(schedule.order)
        cells = [f"{each.speedup:g}x", str(schedule.max_depth), order]
        cells += [f"{each.bare.kl:.2f}", f"{each.bare.top1:.0%}"]
        cells += [f"{each.stand_ins.kl:.2f}", f"{each.stand_ins.top1:.0%}", f"{found.hours(each):.1f}"]
        rows.append(cells + ([] if each.step_clock is None else [f"{each.step_clock:.2f}x"]))
    heads = ["speed-up", "layers", "order", "KL bare", "same token bare", "KL mapped", "same token mapped"]
    heads += ["training hours"] + ([f"step of {found.batch_size}"] if found.batch_size else [])
    best = found.best
    print_table(heads, rows, bold=[number for number, each in enumerate(found.tried) if each in best])
    # A command that is broken by lines, or loses brackets of a path, cannot be pasted.
    out.print(found.advice, markup=False, soft_wrap=True)
    if revision:
        say(f"train takes the hub's main revision: for {revision}, download it and give its folder")
