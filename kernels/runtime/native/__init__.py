"""C kernels for CPUs, compiled once per machine and called through ctypes."""
