"""``skipdecode play``: a page on which a model writes at several speeds side by side."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from . import options as o
from .console import say

Speedups = Annotated[str | None, Option(help="At most three speed-ups (default: 1 and two of those trained for).")]


def play(
    model: o.Model,
    adapter: o.Adapter = None,
    speedups: Speedups = None,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    revision: o.Revision = None,
) -> None:
    """Serve a page to play with: one prompt, and its text at two or three speeds, written at the same time.

    skipdecode play MODEL --adapter fast --speedups 1,1.5,2
    """
    from ..web import play as app

    chosen = None if speedups is None else o.parse_numbers(speedups)
    where = {"dtype": dtype, "device": device, "revision": revision}
    say(f"http://{host}:{port} when the model is loaded; Ctrl-C ends it")
    app.play(model, adapter, chosen, where=where, server_name=host, server_port=port, quiet=True)
