"""The plugin that gives each request of a vLLM server its own depth, and ``skipdecode serve``."""
