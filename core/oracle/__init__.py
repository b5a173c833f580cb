"""float64 references, test cases and random inputs for checking kernels and the conformance kit."""
