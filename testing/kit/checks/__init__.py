"""The checks of the conformance kit, one function each: it returns a note, or raises a Finding or Skipped."""
