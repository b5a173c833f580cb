"""CUDA graphs of steps: of decode, verification, prefill, and of what lies between two attentions."""
