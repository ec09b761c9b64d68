"""vLLM with and without the plugin, on one machine."""
