"""The operating system: child processes, atomic file writes, error texts, logs, escaped text, provenance."""
