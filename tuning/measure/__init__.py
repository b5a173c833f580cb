"""Measurement of backends for a crossover table."""
