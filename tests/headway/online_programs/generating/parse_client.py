# shows: client.beta.chat.completions.parse and client.chat.completions.parse with a pydantic model
# needs: llguidance
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    mood: Literal["good", "bad"]
    sure: bool


client = OpenAI(base_url="http://localhost:8000/v1", api_key="-")
model = client.models.list().data[0].id
for parse in (client.beta.chat.completions.parse, client.chat.completions.parse):
    messages = [{"role": "user", "content": "How is it?"}]
    found = parse(model=model, messages=messages, response_format=Verdict, max_tokens=1500)
    verdict = found.choices[0].message.parsed
    assert isinstance(verdict, Verdict)
    print(verdict)
