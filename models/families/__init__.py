"""Families of models: from a configuration to a DecoderConfig."""
