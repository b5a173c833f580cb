"""Ranks of one engine: their messages, the leading executor, and the loop of a following rank."""
