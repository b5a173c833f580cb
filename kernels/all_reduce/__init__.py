"""Sums over ranks by our kernels: each rank reads what the others hold, from their memory."""
