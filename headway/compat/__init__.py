"""Modules with the names of other engines' APIs."""
