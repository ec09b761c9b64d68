"""Engines that can run generation jobs instead of transformers: vLLM in this process, and workers on a Ray cluster."""

from .engine import Engine, Transformers


def get_engine(name: str) -> Engine:
    """Return the engine ``transformers`` or ``vllm``.

    Raises:
        MissingExtra: vLLM is not installed.
        UnsupportedModel: this release of vLLM was not tested.
    """
    if name == "vllm":
        from .vllm import VllmEngine

        return VllmEngine()
    return Transformers()
