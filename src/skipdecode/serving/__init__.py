"""The vLLM plugin that gives each request its own schedule, and ``skipdecode serve``."""
