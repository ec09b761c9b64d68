"""Read rows of text, make prompts and batches of them, and score generated texts."""
