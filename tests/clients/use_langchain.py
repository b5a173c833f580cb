# pip: langchain-openai langchain-anthropic
"""LangChain: its OpenAI and Anthropic chats, whole, streamed and structured."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour and whether it is dark."""

    name: str
    dark: bool


chat = ChatOpenAI(model="smollm2", max_tokens=40, temperature=0)
assert "Paris" in chat.invoke("What is the capital of France?").content
assert "".join(each.content for each in chat.stream("Hello"))
found = chat.with_structured_output(Colour, method="json_schema").invoke("Name a colour.")
assert isinstance(found, Colour), found
other = ChatAnthropic(model="smollm2", max_tokens=12, temperature=0, base_url=os.environ["ANTHROPIC_BASE_URL"])
assert "Paris" in other.invoke("What is the capital of France?").content
