"""Mixture of experts (MoE): routing, grouped GEMM kernels, and the choice between them."""
