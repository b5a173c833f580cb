"""Chooses the cache layout, block size and backends that serve a model, and the backend of every step."""
