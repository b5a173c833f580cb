# pip: guidance openai
"""guidance over the server: OpenAI's models, and those of vLLM's and SGLang's servers, which constrain every token."""

import json
import os

from guidance import assistant, gen, select, user
from guidance import json as gen_json
from guidance.models import OpenAI
from guidance.models.experimental import SglangModel, VLLMModel
from openai import OpenAI as Client

model = Client().models.list().data[0].id
options = {"echo": False, "api_key": os.environ["OPENAI_API_KEY"], "base_url": os.environ["OPENAI_BASE_URL"]}
schema = {"type": "object", "properties": {"city": {"type": "boolean"}}, "required": ["city"], "additionalProperties": False}

for kind in (OpenAI, VLLMModel, SglangModel):
    lm = kind(model, **options)
    with user():
        lm += "What is the capital of France?"
    with assistant():
        lm += gen("answer", max_tokens=12)
    assert lm["answer"], kind
    with user():
        lm += "Is Paris a city?"
    with assistant():
        lm += gen_json(name="made", schema=schema)
    assert isinstance(json.loads(lm["made"])["city"], bool), lm["made"]
    if kind is OpenAI:  # whose API knows no other form
        continue
    with user():
        lm += "How large is it?"
    with assistant():
        lm += "It is " + select(["big", "small"], name="size") + ", number " + gen("number", regex="[0-9]{3}")
    assert lm["size"] in ("big", "small"), lm["size"]
    assert len(lm["number"]) == 3, lm["number"]
    assert lm["number"].isdigit(), lm["number"]
