"""CUDA C++ kernels for any backend: compiled by NVRTC at first use, cached on disk, launched through the driver."""
