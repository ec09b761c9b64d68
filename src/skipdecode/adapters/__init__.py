"""What stands in for skipped layers: learnt from texts that the model writes itself, without data."""
