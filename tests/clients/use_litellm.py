# pip: litellm
"""LiteLLM: chats, streams and messages through its providers openai and anthropic."""

import os

import litellm

ask = [{"role": "user", "content": "What is the capital of France?"}]
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
asked = {"messages": ask, "max_tokens": 12, "temperature": 0, "api_key": key}
chat = litellm.completion(model="hosted_vllm/smollm2", api_base=base, **asked)
assert "Paris" in chat.choices[0].message.content, chat
stream = litellm.completion(model="openai/smollm2", api_base=base, stream=True, **asked)
assert "Paris" in "".join(each.choices[0].delta.content or "" for each in stream)
other = litellm.completion(model="anthropic/smollm2", api_base=os.environ["ANTHROPIC_BASE_URL"], **asked)
assert "Paris" in other.choices[0].message.content, other
