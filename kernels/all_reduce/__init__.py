"""All-reduce kernels in which each rank writes its tensor into the other GPUs' memory."""
