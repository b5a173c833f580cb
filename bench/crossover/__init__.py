"""The crossover table: which backend is fastest for which phase, batch and length here; measured, kept and explained."""
