"""Checkpoints: files, tensor names, quantization formats and .gguf conversion."""
