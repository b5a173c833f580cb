"""Kernels of other attention libraries, called without Headway, beside its backends."""
