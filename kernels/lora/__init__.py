"""LoRA adapters: their folders, their slots on the device, and the kernels that add them to linear layers."""
