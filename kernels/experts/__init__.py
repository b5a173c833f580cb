"""Mixture of experts (MoE): routing, grouped GEMM kernels, and kernel selection."""
