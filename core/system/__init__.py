"""The operating system: child processes, files that appear whole, errors in words, logs, escaped text, provenance."""
