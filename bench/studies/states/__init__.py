"""Layers with a state: right answers first, then times, for every cut that the kernels of a backend can be given."""
