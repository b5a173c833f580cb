"""Embeddings and scores: from options and prompts to outputs, for `LLM` and the server."""
