"""Weights as they are published: how each format keeps them, and the few forms that products read."""
