# pip: llama-index-llms-openai-like
"""LlamaIndex: its client for servers like OpenAI's."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="smollm2",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    max_tokens=12,
    temperature=0,
)
ask = [ChatMessage(role="user", content="What is the capital of France?")]
assert "Paris" in llm.chat(ask).message.content
assert "Paris" in list(llm.stream_chat(ask))[-1].message.content
