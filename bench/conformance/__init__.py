"""The result file of the conformance grid, and the support matrix made from it."""
