"""Servers side by side, and what ours costs."""
