# shows: beam search with n results
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
options = {"use_beam_search": True, "length_penalty": 1.0, "ignore_eos": True}
found = client.completions.create(
    model=model, prompt="the quick", n=3, temperature=0, max_tokens=8, logprobs=0, extra_body=options
)
scores = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in found.choices]
assert scores == sorted(scores, reverse=True)
assert len({choice.text for choice in found.choices}) == 3
chat = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Hi"}], n=2, max_tokens=8, extra_body=options
)
print([choice.text for choice in found.choices], [choice.message.content for choice in chat.choices])
