# shows: a streamed chat with reasoning and content
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "9.11 and 9.8, which is greater?"}]
answer = client.chat.completions.create(
    model=model, messages=messages, max_tokens=12, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
)
print("reasoning:", getattr(answer.choices[0].message, "reasoning", None))
print("content:", answer.choices[0].message.content)
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=12, stream=True):
    delta = chunk.choices[0].delta
    print(getattr(delta, "reasoning", None) or delta.content or "", end="", flush=True)
