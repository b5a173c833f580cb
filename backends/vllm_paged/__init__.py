"""The backend `vllm_paged`: our CUDA C++ kernels on vLLM's 5-D key cache, compiled at first use."""
