"""The decoder's small operations and its products of few rows as Triton kernels, for GPUs."""
