# shows: ranks that torchrun starts
# refused: tensor_parallel_size starts a process for each rank
import os

from vllm import LLM

os.environ["WORLD_SIZE"] = "2"  # as torchrun does
try:
    llm = LLM("facebook/opt-125m", tensor_parallel_size=2, distributed_executor_backend="external_launcher")
finally:
    del os.environ["WORLD_SIZE"]
