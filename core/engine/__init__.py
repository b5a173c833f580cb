"""The engine, which turns requests into tokens, with one paged KV cache pool for all requests."""
