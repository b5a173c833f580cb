"""Sampling: tokens from logits, and text from tokens."""
