"""Measuring backends for a crossover table."""
