# pip: openai
"""OpenAI's client: chats, completions, responses, files and batches."""

import json
import time

from openai import OpenAI

client = OpenAI()
(model, *_) = (each.id for each in client.models.list())
ask = [{"role": "user", "content": "What is the capital of France?"}]

chat = client.chat.completions.create(model=model, messages=ask, max_tokens=12, temperature=0)
assert "Paris" in chat.choices[0].message.content, chat
stream = client.chat.completions.create(model=model, messages=ask, max_tokens=12, temperature=0, stream=True)
assert "".join(each.choices[0].delta.content or "" for each in stream) == chat.choices[0].message.content

response = client.responses.create(model=model, input="What is the capital of France?", max_output_tokens=12, temperature=0)
assert response.output_text == chat.choices[0].message.content
again = client.responses.create(
    model=model, input="And of Spain?", previous_response_id=response.id, max_output_tokens=12, temperature=0
)
assert again.usage.input_tokens > response.usage.input_tokens
with client.responses.stream(model=model, input="What is the capital of France?", temperature=0) as events:
    kinds = [each.type for each in events]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] == "response.completed", kinds
    assert "Paris" in events.get_final_response().output_text

lines = [
    {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": ask, "max_tokens": 3},
    }
    for number in range(3)
]
sent = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
batch = client.batches.create(input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h")
while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
    time.sleep(0.2)
assert batch.request_counts.completed == 3, batch
assert len(client.files.content(batch.output_file_id).text.splitlines()) == 3
