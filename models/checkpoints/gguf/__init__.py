"""Models in .gguf files."""
