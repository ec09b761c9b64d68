"""What transformers calls the argument that carries a cache."""

from transformers.generation.utils import ALL_CACHE_NAMES

#: The name since transformers 5.24, and the one before it, which 5.24 takes with a warning.
CACHE_NAMES = ("cache", "past_key_values")
#: The installed transformers' name: ``model.generate(**{CACHE: cache})``, ``output[CACHE]``.
CACHE = next(name for name in CACHE_NAMES if name in ALL_CACHE_NAMES)
