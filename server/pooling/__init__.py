"""The server of a pooling model."""
