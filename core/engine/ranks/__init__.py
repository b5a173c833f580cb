"""Ranks of one engine: messages, the executor of rank 0, and the loop of the other ranks."""
