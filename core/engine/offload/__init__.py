"""Memory beyond the pool: a tier in host memory, and one on disk."""
