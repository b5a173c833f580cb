"""Speculative decoding without a draft model: proposers of draft tokens, and the step times that decide whether drafts pay
off."""
