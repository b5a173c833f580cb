"""CUDA C++ of our own, for any backend: compiled by NVRTC at first use, kept on disk, launched through the driver."""
