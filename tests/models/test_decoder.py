"""The packed decoder on every layout: prefill and twenty paged decode steps, two sequences at once, against transformers."""

from __future__ import annotations
