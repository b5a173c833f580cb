"""Compiling and launching kernels, and finding libraries that bring some."""
