"""Trials and measurements of plugins in child processes."""
