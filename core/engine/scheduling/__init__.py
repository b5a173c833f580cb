"""Scheduling: the choice of the next step, and the handling of its results."""
