"""Speculation without a draft model: proposers that guess tokens, and the times of steps by which guesses pay or not."""
