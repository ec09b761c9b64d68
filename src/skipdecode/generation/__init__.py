"""Prompts in, texts and what they cost out: checkpoints, batches, jobs that resume."""
