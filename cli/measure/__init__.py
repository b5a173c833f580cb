"""Commands that measure, check, compare and plan."""
