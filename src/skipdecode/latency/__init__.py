"""Wall clock: profiles of forward passes on this machine, and benchmarks that time generation alternately."""
