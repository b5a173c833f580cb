"""Adapter for transformers' decoders: transformers' code with Headway's attention and paged KV cache."""
