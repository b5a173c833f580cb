"""Crossover tables: schema, files, device identity, comparison and merge."""
