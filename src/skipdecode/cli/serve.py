"""``skipdecode serve``: vLLM's OpenAI server, with a speed per request."""

from typing import Annotated

from typer import Argument, Context, Option

from . import options as o

LOAD = "Under load"


def serve(
    context: Context,
    model: o.Model,
    vllm: Annotated[
        list[str] | None, Argument(metavar="VLLM OPTIONS", help="Any option of vLLM's API server: --port 8000 …")
    ] = None,
    adapter: o.Adapter = None,
    speedups: o.Speedups = None,
    speedup: o.Speedup = None,
    prompt_layers: o.PromptLayers = None,
    check: Annotated[
        bool | None, Option("--check", help="Compare with the plain model before serving; on GPUs always.")
    ] = None,
    load_speedup: Annotated[
        float | None, Option(help="Speed under load, of requests that name none.", rich_help_panel=LOAD)
    ] = None,
    load_waiting: Annotated[
        int | None, Option(help="Load begins when more requests than this wait.", rich_help_panel=LOAD)
    ] = None,
    load_token_ms: Annotated[
        float | None, Option(help="Load begins when tokens take longer than this, in ms.", rich_help_panel=LOAD)
    ] = None,
) -> None:
    """Serve a model by vLLM's OpenAI API. Requests name their speed: model "MODEL:2x".

    Options that are not below go to vLLM's API server, which replaces this process.
    """
    from ..serving import server

    options = context.params | {"speedups": o.parse_speedups(speedups), "adapter": adapter and str(adapter)}
    given = {name: value for name, value in options.items() if value is not None and name not in ("model", "vllm")}
    server.serve(model, given, vllm or ())
