"""References in float64, cases and random inputs, which kernels and their kit are checked against."""
