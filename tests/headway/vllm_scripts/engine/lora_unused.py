# shows: a program that could take an adapter, and is given none
from typing import Optional

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def ask(llm: LLM, prompt: str, adapter: Optional[LoRARequest] = None) -> str:
    return llm.generate(prompt, SamplingParams(max_tokens=4), lora_request=adapter)[0].outputs[0].text


print(ask(LLM("facebook/opt-125m"), "the"))
