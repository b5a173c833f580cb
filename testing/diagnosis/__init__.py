"""Diagnosis of wrong kernel outputs: likely causes, locations and summaries."""
