"""Which layers run, and how a model skips the others: schedule, cache, gate."""
