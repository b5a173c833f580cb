"""KV cache offloading: a tier of cached pages in host memory, and one on disk."""
