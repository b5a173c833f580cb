"""Benchmarks of whole generations, offline: tokens per second and fraction of the roofline."""
