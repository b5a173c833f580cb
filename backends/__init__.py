"""Built-in attention backends and cache writers; each is registered through the same hooks as anybody else's."""
