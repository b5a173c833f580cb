"""float64 references, test cases and random inputs, against which kernels and the conformance kit are checked."""
