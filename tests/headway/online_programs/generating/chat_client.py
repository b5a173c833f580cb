# shows: a chat with the first model in /v1/models
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
messages = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won the world series in 2020?"},
    {"role": "assistant", "content": "The Los Angeles Dodgers."},
    {"role": "user", "content": "Where was it played?"},
]
answer = client.chat.completions.create(messages=messages, model=model, max_tokens=8)
print(answer.choices[0].message.content, answer.usage)
