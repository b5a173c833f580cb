"""Models: our packed decoder and what finds and loads it. Imports core alone of ours."""
