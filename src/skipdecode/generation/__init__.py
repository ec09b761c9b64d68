"""Generate texts for prompts and count their cost: one batch, many batches, and jobs that resume after a kill."""
