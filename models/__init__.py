"""Models: the packed decoder, encoders, checkpoints and loaders. The only Headway package that it imports is core."""
