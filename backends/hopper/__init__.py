"""The backend `hopper`: our CUDA C++ attention for compute capability 9.0, compiled at first use."""
