""".gguf files of models that mix attention with layers that keep a state, which transformers reads in part or not at all.

llama.cpp's converter writes tensors under names and in layouts of its own: each architecture's rules undo that.
"""
