"""Operations of a decoder's step: norms, RoPE, activations, latent attention, fused with linear layers on a GPU."""
