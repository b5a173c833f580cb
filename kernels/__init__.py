"""Kernels besides attention and states: linear layers, experts, steps between them, LoRA, sampling, all-reduce."""
