"""Speculative decoding without a draft model: proposers of draft tokens, and step times by which drafts pay off or not."""
