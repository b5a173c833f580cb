"""Backends and kernels with one planted mistake each. The conformance kit must detect each of them and name its mistake."""
