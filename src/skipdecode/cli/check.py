"""``skipdecode check``: show on a user's own model that skipping is exact."""

import json

from rich.markup import escape
from typer import Exit

from . import options as o
from .console import out, say


def check(
    model: o.Model,
    adapter: o.Adapter = None,
    speedup: o.Speedup = None,
    dtype: o.Dtype = "float32",
    as_json: o.Json = False,
) -> None:
    """Compare a model that skips layers with an independent reference. Exit code 1 if a claim fails.

    skipdecode check facebook/opt-1.3b
    """
    from ..evaluation.exactness import check_model
    from ..loading.load import Checkpoint

    checkpoint = Checkpoint.resolve(model, adapter)
    findings = []
    for finding in check_model(checkpoint, speedup, dtype):
        findings.append(finding)
        mark = "[green]holds[/]" if finding.held else "[bold red]FAILS[/]"
        out.print(f"{mark}  {finding.claim:44s} {escape(finding.detail)}", soft_wrap=True)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
    if not all(finding.held for finding in findings):
        raise Exit(1)
    if not checkpoint.schedules:
        say(f"exact, but not trained to skip layers: `skipdecode probe {model}` measures what each speed costs")
