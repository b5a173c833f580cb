"""Built-in attention backends and cache writers, registered through the same hooks as plugins."""
