"""Crossover tables for `auto`: measurement, files, and trials of plugins in child processes."""
