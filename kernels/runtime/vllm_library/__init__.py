"""Products over quantised weights out of vLLM's compiled library, which is found where it is installed, never vendored."""
