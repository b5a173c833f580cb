"""Execution of one step on one device: metadata, CUDA graphs, model runner, sampling, memory."""
