"""The engine: requests in, tokens out, over one paged pool."""
