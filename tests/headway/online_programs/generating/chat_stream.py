# shows: a streamed chat with usage, seed, several answers, log-probabilities and a stop text
from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me a story."}],
    max_completion_tokens=12,
    n=2,
    seed=3,
    stop=["\n\n"],
    logprobs=True,
    top_logprobs=2,
    logit_bias={"5": -100},
    stream=True,
    stream_options={"include_usage": True, "continuous_usage_stats": True},
)
texts, usage = ["", ""], None
for chunk in stream:
    for choice in chunk.choices:
        texts[choice.index] += choice.delta.content or ""
    usage = chunk.usage or usage
print(texts, usage)
assert usage.completion_tokens
