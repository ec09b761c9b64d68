"""``skipdecode play``: a page with outputs at several speeds side by side."""

from typing import Annotated

from typer import Option

from ..errors import UsageError
from . import options as o
from .console import say

#: Most speeds that fit on the page, and the speeds of a model that was not trained.
COLUMNS = 3
UNTRAINED = (1.0, 1.5, 2.0)


def play(
    model: o.Model,
    adapter: o.Adapter = None,
    speedups: o.Speedups = None,
    max_new_tokens: Annotated[int, Option(min=8, max=512, help="Most tokens of an output, at the start.")] = 96,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 opens it to others.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.")] = 7860,
) -> None:
    """Serve a page: one prompt, and its output at two or three speeds.

    skipdecode play fast --speedups 1,1.5,2
    """
    from ..generation.chat import sampling_options
    from ..loading.load import Checkpoint
    from ..web.play import launch, page

    checkpoint = Checkpoint.resolve(model, adapter)
    speeds = o.parse_speedups(speedups) or default_speedups(tuple(checkpoint.schedules))
    if len(speeds) > COLUMNS:
        raise UsageError(f"{COLUMNS} speeds fit side by side, not {len(speeds)}")
    schedules = {speedup: checkpoint.schedule(speedup) for speedup in sorted(speeds)}
    tokenizer = checkpoint.tokenizer
    options = sampling_options(checkpoint, {}) if tokenizer.chat_template else {}
    blocks = page(checkpoint.load(), tokenizer, schedules, model, max_new_tokens, **options)
    say(f"http://{host}:{port}; Ctrl-C ends it")
    launch(blocks, server_name=host, server_port=port, quiet=True)


def default_speedups(trained: tuple[float, ...]) -> tuple[float, ...]:
    """Return 1 and the slowest two trained speeds above 1; fixed ones for an untrained model."""
    faster = sorted(speedup for speedup in trained if speedup > 1)
    return (1.0, *faster[: COLUMNS - 1]) if faster else UNTRAINED
