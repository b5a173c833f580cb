"""Which backend, layout and block size serve a model, and which backend serves a step."""
