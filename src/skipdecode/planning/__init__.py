"""Which schedule applies, and which one gives a speed-up of layers or of seconds."""
