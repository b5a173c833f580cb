"""Operations of a decoder's step: norms, rotary embeddings (RoPE), activations, latent attention, fused with linear layers on
GPUs.
"""
