# shows: tools in the chat template, and their results
import json
import random
import string

from vllm import LLM
from vllm.sampling_params import SamplingParams

llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", tokenizer_mode="auto", config_format="auto", load_format="auto", max_model_len=400)


def random_id(length=9):
    return "".join(random.choices(string.ascii_letters + string.digits, k=length))


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages = [{"role": "user", "content": "what is the weather in the city?"}]
outputs = llm.chat(messages, sampling_params=SamplingParams(max_tokens=12, temperature=0.0), tools=tools)
messages.append({"role": "assistant", "content": outputs[0].outputs[0].text})
messages.append({"role": "tool", "content": json.dumps({"degrees": 20}), "tool_call_id": random_id(), "name": "get_weather"})
outputs = llm.chat(messages, SamplingParams(max_tokens=12, temperature=0.0), tools=tools)
print(outputs[0].outputs[0].text)
assert outputs[0].finished
