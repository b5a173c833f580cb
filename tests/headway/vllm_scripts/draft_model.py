# shows: speculation with a draft model
# refused: drafts of a model are not supported yet
from vllm import LLM

llm = LLM("facebook/opt-125m", speculative_config={"model": "facebook/opt-125m", "num_speculative_tokens": 5})
