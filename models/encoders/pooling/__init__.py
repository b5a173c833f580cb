"""Embedding, reranking and reward models: detection, loading and pooling."""
