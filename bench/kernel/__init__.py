"""Attention alone: backends, peers and cache writers on one call."""
