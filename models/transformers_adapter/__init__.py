"""Adapter for decoders of transformers: their code with Headway's attention and paged KV cache."""
