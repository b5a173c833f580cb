"""Encoders, and pooling of hidden states."""
