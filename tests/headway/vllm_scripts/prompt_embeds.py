# shows: embeddings in place of token ids
# refused: not supported yet: prompts are texts or token ids
import torch
from vllm import LLM

llm = LLM("facebook/opt-125m", enable_prompt_embeds=True)
llm.generate({"prompt_embeds": torch.zeros(4, 64)})
