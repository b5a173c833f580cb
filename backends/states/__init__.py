"""Backends for layers that keep a state."""
