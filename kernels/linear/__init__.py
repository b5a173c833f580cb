"""Linear layers: representations of weights and the GEMM kernels that multiply them."""
