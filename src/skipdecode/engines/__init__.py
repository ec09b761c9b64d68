"""Engines that can run generation jobs instead of transformers: vLLM in this process, and workers on a Ray cluster."""
