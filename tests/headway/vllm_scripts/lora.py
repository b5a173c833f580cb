# shows: adapters (LoRA)
# refused: merge the adapter
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(model="facebook/opt-125m", enable_lora=True, max_loras=1, max_lora_rank=8)
llm.generate("the", SamplingParams(max_tokens=4), lora_request=LoRARequest("sql", 1, "adapter"))
