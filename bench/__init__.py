"""Benchmarks: kernels, crossover tables, generation, servers and comparisons of backends."""
