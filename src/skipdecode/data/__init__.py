"""Rows of data, prompts and batches made of them, and metrics of generated texts."""
