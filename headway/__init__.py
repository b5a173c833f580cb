"""Headway: LLM inference on whichever attention kernel is fastest here, now, for this batch."""
