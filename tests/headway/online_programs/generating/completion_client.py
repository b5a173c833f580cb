# shows: completions: streaming, several prompts, log-probabilities, echo
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
completion = client.completions.create(
    model=model, prompt=["A robot may not injure", "a human being"], echo=True, n=2, max_tokens=6, logprobs=3
)
for choice in completion.choices:
    print(choice.index, choice.text, choice.logprobs.token_logprobs[-1])
for chunk in client.completions.create(model=model, prompt="A robot may not injure", max_tokens=6, stream=True):
    print(chunk.choices[0].text, end="")
