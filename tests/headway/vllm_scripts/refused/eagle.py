# shows: speculative decoding with EAGLE heads
# refused: speculative_config
from vllm import LLM

llm = LLM("facebook/opt-125m", speculative_config={"method": "eagle3", "model": "drafts", "num_speculative_tokens": 2})
