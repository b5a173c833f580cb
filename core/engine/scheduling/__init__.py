"""Scheduling: composes the next step, and processes its results."""
