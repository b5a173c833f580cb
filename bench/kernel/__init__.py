"""Kernel benchmarks: single calls of backends, other libraries, cache writers and linear kernels."""
