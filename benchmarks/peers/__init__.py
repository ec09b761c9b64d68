"""The engines people use, beside ours: same shape, prompts and lengths, one paired report (docs/peers.md)."""
