"""Baselines of SkipDecode. :func:`skipdecode.methods.get_method` imports these modules by name."""
