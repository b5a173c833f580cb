# shows: data parallelism in one LLM, expert parallelism
# refused: data_parallel_size
from vllm import LLM

llm = LLM("facebook/opt-125m", data_parallel_size=2, enable_expert_parallel=True)
