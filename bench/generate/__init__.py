"""Whole generations, offline: tokens per second, and the share of the roofline."""
