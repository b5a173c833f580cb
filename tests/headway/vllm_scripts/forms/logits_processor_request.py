# shows: logits processors for one request, bad_words, logit_bias
from vllm import LLM, SamplingParams


def ban(token_ids, logits):
    logits[100:] = float("-inf")
    return logits


llm = LLM("facebook/opt-125m")
params = SamplingParams(max_tokens=20, logits_processors=[ban], bad_words=["fox"], logit_bias={11: -50.0})
outputs = llm.generate("the quick", params)
print(outputs[0].outputs[0].token_ids)
assert max(outputs[0].outputs[0].token_ids) < 100
