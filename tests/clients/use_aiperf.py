# pip: aiperf
"""NVIDIA's AIPerf: a profile of streamed chats of synthetic prompts."""
