# shows: structured_outputs in extra_body (choice, regex, JSON, grammar), response_format, and the older guided_choice
# needs: llguidance
import json
from enum import StrEnum

from openai import OpenAI
from pydantic import BaseModel


class Kind(StrEnum):
    sedan = "sedan"
    truck = "truck"


class Car(BaseModel):
    electric: bool
    kind: Kind


client = OpenAI(base_url="http://localhost:8000/v1", api_key="-")
model = client.models.list().data[0].id


def ask(**more):
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Classify this: it is wonderful!"}], max_tokens=1500, **more
    )
    return answer.choices[0].message.content


assert ask(extra_body={"structured_outputs": {"choice": ["positive", "negative"]}}) in ("positive", "negative")
assert ask(extra_body={"guided_choice": ["positive", "negative"]}) in ("positive", "negative")
assert ask(extra_body={"structured_outputs": {"regex": "[a-f]{3}@x[.]com"}}).endswith("@x.com")
assert Car.model_validate_json(ask(extra_body={"structured_outputs": {"json": Car.model_json_schema()}}))
assert ask(extra_body={"structured_outputs": {"grammar": 'root ::= "SELECT " ("a" | "b")'}}).startswith("SELECT ")
form = {"type": "json_schema", "json_schema": {"name": "car", "schema": Car.model_json_schema()}}
print(json.loads(ask(response_format=form)))
