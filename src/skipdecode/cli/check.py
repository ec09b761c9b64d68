"""``skipdecode check``: prove on a user's own model that skipping is exact."""

from __future__ import annotations

import json
from typing import Annotated

from rich.markup import escape
from typer import Exit, Option

from . import options as o
from .console import out, say


def check(
    model: o.Model,
    speedup: o.Speedup = None,
    dtype: o.Dtype = "float32",
    device: o.Device = None,
    revision: o.Revision = None,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Prove on your own model that skipping is exact: compare it with the stock model, in batches and alone.

    Logits are equal within ten times what the stock model's own cached and uncached ones differ by; what float32
    cannot tell is computed in float64. The exit code is 1 if a claim does not hold, or if the model cannot skip.

    skipdecode check facebook/opt-1.3b
    """
    from ..evaluation.exactness import check_model
    from ..loading.load import read_config
    from ..model.config import is_trained

    findings = []
    for finding in check_model(model, speedup, dtype=dtype, device=device, revision=revision):
        findings.append(finding)
        if not as_json:
            mark = "[green]holds[/]" if finding.held else "[bold red]FAILS[/]"
            out.print(f"{mark}  {finding.claim:44s} {escape(finding.detail)}", soft_wrap=True)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
    if not all(finding.held for finding in findings):
        raise Exit(1)
    if not is_trained(read_config(model, revision)):
        say(
            "exact, but not trained to skip: texts get worse with every layer that is left out. skipdecode probe "
            f"{model} measures how much, and skipdecode train teaches it to skip"
        )
