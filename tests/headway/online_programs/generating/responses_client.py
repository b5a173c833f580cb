# shows: the responses API: with and without streaming, and a second turn
from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="empty")
model = client.models.list().data[0].id
first = client.responses.create(model=model, input="Tell me a bedtime story.", max_output_tokens=8)
again = client.responses.create(model=model, input="Go on.", previous_response_id=first.id, max_output_tokens=8)
print(first.output_text, again.output_text)
for event in client.responses.create(model=model, input="Hello", max_output_tokens=6, stream=True):
    if event.type == "response.output_text.delta":
        print(event.delta, end="")
