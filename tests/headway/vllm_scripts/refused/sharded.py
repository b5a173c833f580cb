# shows: checkpoints that are saved rank by rank
# refused: load_format
from vllm import LLM

llm = LLM("facebook/opt-125m", load_format="sharded_state")
