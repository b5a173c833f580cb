"""The contract between Headway and plugins: specs, layouts, metadata, backends, support and errors. Versioned by
`API_VERSION`."""
