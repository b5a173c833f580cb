"""Pooling models (embeddings and scores) for `LLM` and the server: startup, jobs and outputs."""
