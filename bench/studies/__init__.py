"""Studies for this repository's documentation; not part of the wheel."""
