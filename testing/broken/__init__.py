"""Backends and kernels with one planted mistake each. The kit must detect each one and name its mistake."""
