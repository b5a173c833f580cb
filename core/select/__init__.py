"""Selection of the cache layout, block size and backends for a model at start, and of the backend for every step."""
