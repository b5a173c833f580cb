# shows: a forced tool call, its result, and the next turn
# needs: llguidance
import json

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="dummy")
model = client.models.list().data[0].id
schema = {
    "type": "object",
    "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "weather", "description": "Get the weather", "parameters": schema}}]
messages = [{"role": "user", "content": "What is the weather like?"}]
answer = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=1500)
(call,) = answer.choices[0].message.tool_calls[:1]
arguments = json.loads(call.function.arguments)
assert arguments["unit"] in ("celsius", "fahrenheit")
messages += [
    {"role": "assistant", "tool_calls": [call.model_dump()]},
    {"role": "tool", "tool_call_id": call.id, "content": f"20 {arguments['unit']}"},
]
print(client.chat.completions.create(model=model, messages=messages, max_tokens=8).choices[0].message.content)
