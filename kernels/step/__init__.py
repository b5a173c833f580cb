"""Operations of a decoder step: norms, rotary embeddings (RoPE), activations and latent attention, fused with linear layers on
GPUs.
"""
