"""The conformance kit: tests of a kernel against the contract."""
