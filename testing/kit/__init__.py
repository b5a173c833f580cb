"""Conformance kit: tests of a kernel against the contract."""
