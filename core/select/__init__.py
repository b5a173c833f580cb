"""Selection of a model's cache layout, block size and backends at start, and of the backend for every step."""
