"""Find the schedule that applies, or make one that gives a speed-up in layers or in seconds."""
