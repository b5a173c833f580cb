"""Texts to vectors and scores: batches of whole texts, without a cache, a scheduler or tokens to come."""
