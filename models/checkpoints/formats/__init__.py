"""Quantized weights of checkpoints: their storage formats and their conversion for Headway's kernels."""
