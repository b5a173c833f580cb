"""The contract (spec, metadata, layout, backend, support) and the engine. Imports nothing else of ours, no kernel library."""
