"""Selection of a model's cache layout, block size and backends when the engine starts, and of the backend for every step."""
