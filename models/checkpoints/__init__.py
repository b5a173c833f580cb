"""Checkpoints: files, names of tensors, quantization formats, .gguf."""
