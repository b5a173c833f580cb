"""Limits of the server: admission, connections, sizes, keys."""
