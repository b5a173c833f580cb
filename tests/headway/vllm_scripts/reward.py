# shows: reward models
# refused: classify and encode run classifiers
from vllm import LLM

llm = LLM("Qwen/Qwen2.5-0.5B-Instruct", runner="pooling", convert="embed")
llm.reward(["the quick"])
