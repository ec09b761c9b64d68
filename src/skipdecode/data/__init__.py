"""Text in, batches out, texts scored: rows, tasks, tokenization, collation, metrics."""
