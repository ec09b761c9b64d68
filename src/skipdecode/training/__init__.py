"""Training a model for its schedules, and going on where a run was stopped."""
