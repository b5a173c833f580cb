# pip: instructor
"""Instructor: objects by a JSON schema, and by a tool that must be called."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "Madrid"]


ask = [{"role": "user", "content": "What is the capital of France?"}]
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(OpenAI(), mode=mode)
    answer = client.chat.completions.create(
        model="smollm2", messages=ask, response_model=Answer, max_tokens=80, max_retries=0, temperature=0
    )
    assert answer.city in ("Paris", "Madrid"), (mode, answer)
