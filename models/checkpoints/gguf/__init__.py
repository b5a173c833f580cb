"""Loading of models from .gguf files."""
