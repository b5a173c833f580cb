"""Backends for layers with a recurrent state (linear attention, SSM)."""
