"""Models that turn texts into vectors or scores: how they are told, loaded, and pooled."""
