"""The backend `vllm_paged`: Headway's CUDA C++ paged attention for vLLM's 5-D key cache, compiled at first use."""
