# shows: reward models
# refused: rewards of tokens are not supported
from vllm import LLM

llm = LLM("Qwen/Qwen2.5-0.5B-Instruct", runner="pooling", convert="embed")
llm.reward(["the quick"])
