"""One short file per engine: how it loads a checkpoint and generates greedily, in an environment of its own."""
