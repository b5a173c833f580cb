"""Measurements: workload grammar, throughput, comparisons."""
