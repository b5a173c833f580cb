# shows: log-probabilities of prompts
import math

from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", max_logprobs=5)
texts = ["the quick brown fox jumps over the lazy dog", "dog dog the fox"]
outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))
for output in outputs:
    chosen = [entry[token].logprob for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
    print(math.exp(-sum(chosen) / len(chosen)))
    assert output.prompt_logprobs[0] is None
