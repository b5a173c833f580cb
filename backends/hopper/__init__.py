"""The backends for H100 and H200: Headway's CUDA C++ attention for compute capability 9.0, compiled at first use."""
