"""The plain data of an engine: options, sequences, steps, deltas, cache groups, the pool."""
