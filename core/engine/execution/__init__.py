"""Execution of steps on one device: metadata, CUDA graphs, model runner, sampling and memory."""
