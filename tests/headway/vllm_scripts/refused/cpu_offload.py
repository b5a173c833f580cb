# shows: weights in host memory
# refused: cpu_offload_gb
from vllm import LLM

llm = LLM("facebook/opt-125m", cpu_offload_gb=4)
