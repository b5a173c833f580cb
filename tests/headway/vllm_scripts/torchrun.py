# shows: ranks started by torchrun
# refused: tensor_parallel_size starts a process for each rank
from vllm import LLM

llm = LLM("facebook/opt-125m", tensor_parallel_size=1, distributed_executor_backend="external_launcher")
