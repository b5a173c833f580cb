"""KV cache offloading: a tier of cached pages in host memory, and a tier on disk."""
