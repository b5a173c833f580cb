"""Backends and kernels with one planted mistake each. The kit must detect every one of them and name its mistake."""
