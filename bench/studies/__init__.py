"""Measurements for this repository's own pages; no part of the wheel."""
