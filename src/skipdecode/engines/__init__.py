"""Other engines of generation jobs: vLLM in this process, and workers of a Ray cluster."""
