"""What a third party may import: specs, layouts, metadata, backends, support and errors. Versioned by `API_VERSION`."""
