"""`flash_attn_3`: FlashAttention 3 (Shah et al. 2024) from whichever library of this machine holds it."""
