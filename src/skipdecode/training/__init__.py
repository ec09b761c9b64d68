"""Train a model for its schedules, and resume a stopped run."""
