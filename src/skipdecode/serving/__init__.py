"""A depth per request inside vLLM: the plugin, and what runs where."""
