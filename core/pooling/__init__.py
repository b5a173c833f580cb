"""Pooling models: vectors and scores from batches of whole texts, without a cache or a scheduler."""
