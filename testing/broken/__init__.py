"""Backends with one planted mistake each: the kit must catch every one of them and name its mistake."""
