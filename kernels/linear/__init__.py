"""Linear layers: representations of weights, and the GEMM and GEMV kernels that multiply them."""
