"""Benchmarks of whole generations, offline: tokens per second and share of the roofline."""
