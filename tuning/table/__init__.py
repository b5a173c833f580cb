"""Crossover tables: schema, files, identity, store, comparison."""
