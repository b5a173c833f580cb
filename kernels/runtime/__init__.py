"""Compiling and launching kernels, and finding third-party kernel libraries."""
