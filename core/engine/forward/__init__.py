"""A forward pass: the attention that a model calls, latent attention, block tables."""
