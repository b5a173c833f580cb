"""Checks of the conformance kit. Each is a function that returns a note, or raises Finding or Skipped."""
