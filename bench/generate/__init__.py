"""Offline benchmarks of end-to-end generation: tokens per second and fraction of the roofline."""
