"""Speculation without a draft model: who guesses tokens, how many guesses a step verifies, and whether any pay at all."""
