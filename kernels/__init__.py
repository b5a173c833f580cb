"""Kernels for all operations except attention and states: linear layers, experts, the operations between these, LoRA, sampling,
all-reduce."""
