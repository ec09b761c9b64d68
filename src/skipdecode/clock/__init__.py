"""Wall clock: what passes take on this machine, equal steps timed alternately, and benchmarks. On generation."""
