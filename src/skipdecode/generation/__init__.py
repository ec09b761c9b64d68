"""Prompts in, texts and what they cost out: batches, jobs that resume."""
