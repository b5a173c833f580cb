"""What a backend is tested with: cases, the float64 reference, and the conformance kit."""
