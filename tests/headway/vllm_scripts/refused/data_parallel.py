# shows: several copies of a model in one LLM, experts over GPUs
# refused: data_parallel_size
from vllm import LLM

llm = LLM("facebook/opt-125m", data_parallel_size=2, enable_expert_parallel=True)
